"""What must hold before the first step: the student is the teacher, retention reaches what is trained, words are known.

Are the old instructions the words that the policy knows? Asked before anything is built or trained.

A wrong word does not fail: the anchors then hold what the policy does under words that nobody will use, every number of
the run looks well, and the skill is gone. So the instructions are compared with every list of tasks that is at hand,
with the tokenizer, and with what the policy does (decision 0032).
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lerobot_craft.anchors.build import old_instructions
from lerobot_craft.anchors.plan import parse_old_instructions, plain
from lerobot_craft.anchors.recipe import OLD_DATASET
from lerobot_craft.anchors.teacher import Teacher
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.anchors.verify import Reproduction, floor_of, relative_deviation, reproduce
from lerobot_craft.core.ranks import main_says
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.acting import Frames, actions_under, spread_of_actions, take_frames
from lerobot_craft.evaluation.intervals import FloatArray
from lerobot_craft.evaluation.listening import apart
from lerobot_craft.lerobot_api.datasets import instructions, local_copies, open_metadata
from lerobot_craft.lerobot_api.pretrained import autocast, autocast_dtype, autocast_name
from lerobot_craft.lerobot_api.processors import tokens_cut_off, unknown_words
from lerobot_craft.memory.change import did_you_mean
from lerobot_craft.memory.format import memory_in, read_memory
from lerobot_craft.policies import adapter_for, check_reach, mode, unwrapped
from lerobot_craft.training.anchor_batches import CachedAnchors, policy_inputs
from lerobot_craft.training.anchor_source import Anchors
from lerobot_craft.training.checkpoints import CHECKPOINTS, TRAIN_CONFIG
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.journal import RUN_FILE, read_run_file
from lerobot_craft.training.methods.method import Context
from lerobot_craft.training.run_memory import OFF, find_memory
from lerobot_craft.training.run_settings import saved_old_instructions

_REPRODUCED = 32
_TOGETHER = 16
_BACKWARD = 2  # anchors of the one backward: the graph is the same for any number


@dataclass(frozen=True)
class StartReport:
    """What the checks measured.

    Attributes:
        reproduction: Drift of the student from the teacher before the first step; None in a resumed run.
        held: Trained tensors that the retention gradient reaches.
        free: Trained tensors that it does not.
    """

    reproduction: Reproduction | None
    held: int
    free: int


def check_start(context: Context, anchors: Anchors, loss_type: str) -> StartReport:
    """Refuse to train what would not be held, or held to something else than the teacher.

    Raises:
        CraftError: Gradients are scaled (float16), retention reaches nothing that is trained, or the student is not the
            teacher at its first step.
    """
    _refuse_float16(context)
    layers = anchors.retained.layers or None
    reach = check_reach(adapter_for(context.teacher.config), context.policy, layers)
    _check_graph(context, anchors, loss_type)
    reproduction = None if context.resumed else _check_student(context, anchors)
    return StartReport(reproduction, len(reach.held), len(reach.free))


def _refuse_float16(context: Context) -> None:
    if "fp16" in (autocast_name(context.teacher.config), context.accelerator.mixed_precision):
        raise CraftError(
            "float16 training scales its loss, which two gradients that are merged do not survive: train in bfloat16 "
            "(--policy.dtype=bfloat16, or `accelerate launch --mixed_precision=bf16`) or in float32"
        )


def _check_graph(context: Context, anchors: Anchors, loss_type: str) -> None:
    """One backward: what `check_reach` concludes from names, autograd must confirm."""
    adapter, policy = adapter_for(context.teacher.config), unwrapped(context.policy)
    few = anchors.take(torch.arange(min(_BACKWARD, anchors.num_anchors)))
    batch = policy_inputs(few.raw, context.teacher.preprocessor)
    with mode(policy, train=adapter.train_mode):
        with autocast(context.teacher.config):
            drift = student_drift(
                adapter, policy, batch, few.columns, anchors.retained, loss_type, draw=few.draw
            ).mean()
        # Within the mode: gradient checkpointing runs the forward again.
        reached = drift.requires_grad and any(
            gradient is not None for gradient in torch.autograd.grad(drift, context.trained, allow_unused=True)
        )
    if not reached:
        raise CraftError(
            f"the gradient of {anchors.retained.mode} retention reaches none of the {len(context.trained)} trained "
            f"tensors of this {adapter.policy_type}, so it would hold nothing: {adapter.how_to_reach(policy)}"
        )


def _check_student(context: Context, anchors: Anchors) -> Reproduction:
    found = _reproduction(context, anchors)
    if found.holds:
        return found
    if anchors.directory is None:
        why = "the adapter does not start at zero (see --peft.init_type), or the policy's forward is random"
    else:
        why = (
            "weights, statistics and tokenizers are the cache's, so a PEFT adapter that does not start at zero (see "
            "--peft.init_type), the images, the device or the library versions make the difference: build the cache "
            "again on this machine with `craft cache build` if it is not the adapter"
        )
    raise CraftError(
        f"before the first step the student already differs from {anchors.directory or 'its teacher'}: over "
        f"{found.anchors} anchors the relative drift is up to {found.largest:.2g}, where rounding leaves at most "
        f"{found.floor:.0e}. Retention would pull to something else than what the policy can do: {why}"
    )


def _reproduction(context: Context, anchors: Anchors) -> Reproduction:
    student = replace(context.teacher, policy=unwrapped(context.policy))
    if isinstance(anchors, CachedAnchors):
        return reproduce(anchors.loader, student, _REPRODUCED, _TOGETHER)
    adapter = adapter_for(student.config)
    chosen = torch.arange(min(_REPRODUCED, anchors.num_anchors))
    found = []
    with torch.no_grad(), mode(student.policy, train=adapter.train_mode):
        for indices in chosen.split(_TOGETHER):
            deviation = relative_deviation(adapter, student, anchors.take(indices), anchors.retained)
            found.append(deviation.max())
    dtype = autocast_dtype(context.teacher.config) or _widest_dtype(context)
    return Reproduction(len(chosen), float(torch.stack(found).max()), floor_of(dtype, adapter, anchors.retained))


def _widest_dtype(context: Context) -> str:
    widest = max(unwrapped(context.policy).parameters(), key=lambda parameter: parameter.numel())
    return str(widest.dtype).removeprefix("torch.")


logger = logging.getLogger(__name__)

Lists = Mapping[str, Sequence[str]]  # what a list is called -> its instructions

NONSENSE = ("blorp fizzle quux", "purple ideas sleep furiously")
# Words that are in no list count as heard when they are further from nonsense than this many times the distance between
# two kinds of nonsense: half of what right words had in the demo (decision 0032).
_HEARD = 1.5
FRAMES = 8
_REMEDY = (
    "Give the words that the policy was trained with, as its dataset's meta/tasks.parquet has them. "
    "--craft.strict=true refuses instead of warning."
)


_MEMORY = "the memory"
_RECORD = "the checkpoint's own record"  # what an earlier run was told, which may have been wrong too


class Found(NamedTuple):
    """The instructions as the policy knows them, what was changed for that, and what looks wrong."""

    instructions: list[str]
    notes: list[str]
    doubts: list[str]


def check_wording(cfg: Any, craft: CraftConfig, checkpoint: Path, teacher: Teacher, dataset: Any) -> CraftConfig:
    """The settings with the old instructions as the policy knows them; what looks wrong is told, or refused if strict.

    A collective: the main rank looks, because lists may lie on its machine only, and all ranks go on with its answer.

    Args:
        cfg: lerobot's settings.
        craft: `--craft.*`.
        checkpoint: The policy's directory.
        teacher: The policy before its first step.
        dataset: Of the new task.

    Raises:
        CraftError: Something looks wrong and `--craft.strict` is set.
    """
    answer = json.loads(main_says(lambda: json.dumps(_look(cfg, craft, checkpoint, teacher, dataset))))
    found = Found(*answer)
    if found.doubts and craft.strict:
        raise CraftError(
            "--craft.strict=true, and the old instructions look wrong:\n"
            + "\n".join(f"- {doubt}" for doubt in found.doubts)
            + "\nGive the words that the policy was trained with, or leave out --craft.strict to train with a warning"
        )
    if craft.old_instructions is None or found.instructions == parse_old_instructions(craft.old_instructions):
        return craft
    return replace(craft, old_instructions="".join(f"{instruction}\n" for instruction in found.instructions))


def _look(cfg: Any, craft: CraftConfig, checkpoint: Path, teacher: Teacher, dataset: Any) -> Found:
    lists = known_lists(craft, checkpoint)
    found = compare_with_lists(craft.old_instructions, lists)
    asked = found.instructions or _unlisted(craft, lists)
    if asked and adapter_for(teacher.config).reads_instruction and not cfg.dataset.streaming:
        frames = take_frames(teacher, dataset, FRAMES, FRAMES, 0, cfg.rename_map)
        known = {task for name, tasks in lists.items() if name != _RECORD for task in tasks}
        found.doubts.extend(read_by_tokenizer(teacher, frames, asked))
        found.doubts.extend(heard_by_policy(teacher, frames, asked, known))
    for note in found.notes:
        logger.info("--craft.old_instructions: %s", note)
    if found.doubts and not craft.strict:
        for doubt in found.doubts:
            logger.warning("old instructions: %s", doubt)
        logger.warning("old instructions: %s", _REMEDY)
    return found


def _unlisted(craft: CraftConfig, lists: Lists) -> list[str]:
    """What is kept where no list was given: the tasks of the memory and of the old datasets."""
    held = [] if craft.memory == OFF else list(lists.get(_MEMORY, ()))
    if craft.old_dataset.repo_id:
        held += old_instructions(craft)
    return list(dict.fromkeys(held))


def known_lists(craft: CraftConfig, checkpoint: Path) -> dict[str, list[str]]:
    """Every list of tasks that tells what a policy was trained on, by what it is called; nothing is downloaded for it.

    Args:
        craft: `--craft.*`, for the memory and the old datasets.
        checkpoint: `pretrained_model` of the policy.
    """
    lists: dict[str, list[str]] = {}
    if (place := memory_in(checkpoint) if craft.memory == OFF else find_memory(craft.memory, checkpoint)) is not None:
        lists[_MEMORY] = list(read_memory(place).instructions)
    for repo_id, root in craft.old_dataset.addresses(OLD_DATASET):
        meta = open_metadata(repo_id, root, craft.old_dataset.revision, named=OLD_DATASET)
        lists[f"--craft.old_dataset {repo_id}"] = instructions(meta)
    for read in (_of_record, _of_trained_on):
        try:
            lists |= read(checkpoint)
        except CraftError as error:
            logger.warning("a list of the policy's tasks is left out: %s", error)
    return {name: tasks for name, tasks in lists.items() if tasks}


def _of_record(checkpoint: Path) -> dict[str, list[str]]:
    """What the run of CRaFT that wrote the checkpoint was told to keep."""
    tasks = []
    if (given := saved_old_instructions(checkpoint)) is not None:
        tasks += parse_old_instructions(given)
    # OUTPUT_DIR/checkpoints/STEP/pretrained_model
    output_dir = checkpoint.resolve().parents[2]
    if checkpoint.resolve().parents[1].name == CHECKPOINTS and (output_dir / RUN_FILE).is_file():
        tasks += read_run_file(output_dir).tasks
    return {_RECORD: list(dict.fromkeys(tasks))}


def _of_trained_on(checkpoint: Path) -> dict[str, list[str]]:
    """Tasks of the dataset that the checkpoint was trained on last, if that is on this machine."""
    file = checkpoint / TRAIN_CONFIG.name
    if not file.is_file():
        return {}
    try:
        trained_on = json.loads(file.read_text(encoding="utf-8"))["dataset"]
        repo_id, root, revision = trained_on["repo_id"], trained_on.get("root"), trained_on.get("revision")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CraftError(f"{file} cannot be read ({type(error).__name__}: {error})") from error
    places = [Path(root)] if root is not None else local_copies(repo_id, revision)
    here = next((place for place in places if (place / "meta" / "info.json").is_file()), None)
    if here is None:
        return {}
    return {f"the dataset {repo_id}, which the policy was trained on": instructions(open_metadata(repo_id, here))}


def compare_with_lists(given: str | None, lists: Lists) -> Found:
    """What was typed against what is known: case, spaces and full stops are set right, commas too where they are sure.

    Args:
        given: `--craft.old_instructions`.
        lists: From `known_lists`; empty where nothing is known.
    """
    if given is None:
        return Found([], [], [])
    known = list(dict.fromkeys(task for tasks in lists.values() for task in tasks))
    spelling = {plain(task): task for task in reversed(known)}
    named: list[str] = []
    notes, doubts = [], []
    for task in parse_old_instructions(given):
        parts = [part.strip() for part in task.split(",") if part.strip()]
        if task in known:
            named.append(task)
        elif plain(task) in spelling:
            named.append(spelling[plain(task)])
            notes.append(f"{task!r} is read as {named[-1]!r}, as the policy knows it")
        elif len(parts) > 1 and all(plain(part) in spelling for part in parts):
            named += [spelling[plain(part)] for part in parts]
            notes.append(f"{task!r} is read as {len(parts)} instructions; between them belongs ;")
        else:
            named.append(task)
            if known:
                doubts.append(
                    f"{task!r} is in no list of the policy's tasks ({'; '.join(lists)}): {did_you_mean(task, known)}"
                )
            elif len(parts) > 1 and task == given.strip():
                doubts.append(
                    f"{task!r} is one instruction with commas. If these are {len(parts)}, put ; between them; if it is "
                    "one, give a file with one instruction per line"
                )
    return Found(list(dict.fromkeys(named)), notes, doubts)


def read_by_tokenizer(teacher: Teacher, frames: Frames, asked: Sequence[str]) -> list[str]:
    """Which instructions the policy's tokenizer does not know or cuts off."""
    doubts = []
    for task in asked:
        if words := unknown_words(teacher.preprocessor, task):
            doubts.append(f"{task!r}: the policy's tokenizer has no token for {', '.join(map(repr, words))}")
        raw = frames.batches[0]
        observed = {key: value for key, value in raw.items() if key.startswith("observation.")}
        prompt = {**observed, "task": [task] * len(raw["task"])}
        cut, room = tokens_cut_off(prompt, frames.camera_keys, teacher.preprocessor)
        if cut:
            doubts.append(f"{task!r} is too long: the policy reads {room} tokens, and {cut} more are cut off")
    return doubts


def heard_by_policy(teacher: Teacher, frames: Frames, asked: Sequence[str], known: set[str]) -> list[str]:
    """Which instructions the policy does not react to, by what it does in the same frames."""
    told = [*asked, *NONSENSE]
    actions, again = (actions_under(teacher, frames, told, noise) for noise in (0, 1))
    return unheard(asked, *apart(actions, again, spread_of_actions(teacher, actions)), known)


def unheard(asked: Sequence[str], distance: FloatArray, variation: FloatArray, known: set[str]) -> list[str]:
    """What to say of instructions that act as nonsense does, or as another one does.

    Words that are in a list are right, so less is asked of them: that chance alone does not explain what they change.
    Two of them may well ask for the same.

    Args:
        asked: The instructions; both kinds of nonsense come after them in what follows.
        distance: Between the actions under each two [I + 2, I + 2], in standard deviations of the policy's actions.
        variation: Of the actions under each between two draws of noise [I + 2].
        known: Instructions that the policy was trained with.
    """
    doubts = []
    for i, task in enumerate(asked):
        from_nonsense, needed = heard_margin(i, distance, variation, listed=task in known)
        if from_nonsense <= needed:
            doubts.append(
                f"{task!r}: the policy does not react to these words. In frames of the new task its actions differ "
                f"from those under nonsense by {from_nonsense:.2f} standard deviations; words that it knows differ by "
                f"more than {needed:.2f}"
            )
            continue
        for j, other in enumerate(asked[:i]):
            chance = max(variation[i], variation[j])
            if distance[i, j] <= chance and not {task, other} <= known:
                doubts.append(
                    f"{task!r}: the policy does what it does under {other!r}. In frames of the new task the actions "
                    f"differ by {distance[i, j]:.2f} standard deviations, and by chance alone by {chance:.2f}"
                )
    return doubts


def heard_margin(i: int, distance: FloatArray, variation: FloatArray, *, listed: bool) -> tuple[float, float]:
    """How far instruction i is from nonsense, and what it must exceed to count as heard."""
    chance = max(variation[i], *variation[-2:])
    needed = chance if listed else max(chance, _HEARD * distance[-2, -1])
    return float(distance[i, -2:].min()), float(needed)
