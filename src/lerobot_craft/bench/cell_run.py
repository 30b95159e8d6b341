"""Run a cell in this process: demonstrations, base training, fine-tuning and evaluation, or a film.

Base policies as weight files: training them is the largest cost, so it is done once and the files are shared.

Base training always ends by rounding to half precision, so a policy from a file is bit-identical to the trained one.
"""

import contextlib
import functools
import os
import shlex
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from lerobot_craft.bench.base_policies import make_start
from lerobot_craft.bench.cell_files import LOG_FILE, CellResult, Recorded, begin, claimed, finish, result_of
from lerobot_craft.bench.cells import Base, Cell, Demos, Film, Rollouts, Run, Trial
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.bench.method_definition import as_argv
from lerobot_craft.bench.settings import first_start
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import write_atomically

WEIGHTS = "model.safetensors"
_METADATA = {"format": "pt"}  # required by transformers


def round_weights(checkpoint: Path) -> None:
    """Round a checkpoint's weights to half precision; their dtype stays."""
    weights = load_file(checkpoint / WEIGHTS)
    save_file(
        {name: _halved(value).to(value.dtype) for name, value in weights.items()}, checkpoint / WEIGHTS, _METADATA
    )


def keep_weights(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint's weights to a file, in half precision."""
    file.parent.mkdir(parents=True, exist_ok=True)
    halved = {name: _halved(value) for name, value in load_file(checkpoint / WEIGHTS).items()}
    write_atomically(file, save(halved, _METADATA))


def restore_weights(start: Path, file: Path, checkpoint: Path) -> None:
    """Make a checkpoint from an untrained policy and a weight file.

    Args:
        start: The untrained policy.
        file: From `keep_weights`.
        checkpoint: Output directory.

    Raises:
        CraftError: The file is damaged, or does not match the policy.
    """
    try:
        untrained, kept = load_file(start / WEIGHTS), load_file(file)
    except SafetensorError as error:
        raise CraftError(f"{file} is damaged ({error}): remove it, and the base policy is trained") from error
    if {name: value.shape for name, value in untrained.items()} != {name: value.shape for name, value in kept.items()}:
        raise CraftError(f"{file} holds the weights of another policy: remove it, and the base policy is trained")
    shutil.copytree(start, checkpoint)
    weights = {name: value.to(untrained[name].dtype) for name, value in kept.items()}
    save_file(weights, checkpoint / WEIGHTS, _METADATA)


def _halved(value: Tensor) -> Tensor:
    return value.to(torch.float16) if value.is_floating_point() else value


Train = Callable[[list[str]], int]

# A cell's flags define what it knows of the old tasks. A memory left in the checkpoint by an earlier run of a sequence
# would add to that, so methods that use a memory say so in their own flags, which come later.
_NO_MEMORY = {"craft.memory": "off", "craft.remember": 0}
"""`craft train` on its arguments: the exit code."""


def ensure(cell: Cell, train: Train, *, wait: bool = True) -> CellResult:
    """The result of a cell; missing cells that it needs, and the cell itself, are run first.

    Args:
        cell: The cell.
        train: Runs `craft train`.
        wait: Whether to wait for a cell that another process is running.

    Raises:
        CellBusyError: Another process is running one of the cells, and `wait` is false.
        CraftError: A cell cannot be run.
    """
    if (result := result_of(cell)) is not None:
        return result
    for needed in cell.needs:
        ensure(needed, train, wait=wait)
    with claimed(cell, wait=wait):
        # Another process may have finished it in the meantime.
        return result_of(cell) or _run(cell, train)


def _run(cell: Cell, train: Train) -> CellResult:
    begin(cell)
    began = time.perf_counter()
    with output_to(cell.directory / LOG_FILE):
        try:
            found = _work(cell, train)
        except Exception:
            traceback.print_exc()  # into the log; the caller gets one line
            raise
    result = CellResult(seconds=time.perf_counter() - began, **found)
    finish(cell, result)
    return result


@functools.singledispatch
def _work(cell: Cell, train: Train) -> dict[str, Any]:
    raise NotImplementedError(type(cell))


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Redirect all output of this process into a file, including what libraries write outside Python."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    try:
        with path.open("a", buffering=1) as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
            with contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
                yield
    finally:
        for descriptor, original in zip((1, 2), kept, strict=True):
            os.dup2(original, descriptor)
            os.close(original)


@_work.register
def _record(cell: Demos, train: Train) -> dict[str, Any]:
    from lerobot_craft.bench.metaworld.recording import record

    record(cell.data, cell.recorded, cell.episodes, cell.seed, view=cell.settings.view)
    return {"recorded": _recorded(cell.data)}


def _recorded(root: Path) -> Recorded:
    from lerobot_craft.lerobot_api.datasets import open_metadata

    return Recorded(open_metadata(f"craft/{root.name}", root).total_frames, _bytes_in(root))


def _bytes_in(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


@_work.register
def _train_base(cell: Base, train: Train) -> dict[str, Any]:
    from lerobot_craft.bench.reference_drift import keep_reference

    old_data, policy = cell.demos.data, cell.policy
    start = cell.directory / "start"
    make_start(policy, start, old_data, cell.instructions, cell.seed)
    if cell.file is not None and cell.file.is_file():
        restore_weights(start, cell.file, cell.checkpoint)
        found: dict[str, Any] = {}
    else:
        found = _train_from(start, cell, train)
        round_weights(cell.checkpoint)
        if cell.file is not None:
            keep_weights(cell.checkpoint, cell.file)
    keep_reference(cell.checkpoint, old_data, len(cell.scenario.old), policy.hidden_layers, cell.reference)
    return found


def _train_from(start: Path, cell: Base, train: Train) -> dict[str, Any]:
    flags = {
        "policy.path": start,
        **_dataset_flags(cell.demos.data),
        "output_dir": cell.output_dir,
        **_NO_MEMORY,
        **cell.inputs["flags"],
        "craft.enabled": True,
        "craft.method": "naive",
        "craft.preload": True,
    }
    return _train(cell, as_argv(flags), train)


@_work.register
def _try(cell: Trial, train: Train) -> dict[str, Any]:
    found = _evaluate(cell, cell.base)
    if cell.settings.view == "seen":
        found["blind"] = _evaluate(cell, cell.base, blindfold=True)["successes"]
    return found


@_work.register
def _play(cell: Rollouts, train: Train) -> dict[str, Any]:
    from lerobot_craft.bench.metaworld.own_rollouts import record_own

    view, old = cell.settings.view, cell.scenario.old
    player = _player(cell, cell.base.checkpoint)
    found = record_own(cell.data, player, old, cell.episodes, cell.first_start, view)
    return {"recorded": _recorded(cell.data), "successes": found}


@_work.register
def _fine_tune(cell: Run, train: Train) -> dict[str, Any]:
    if cell.method.remembers:
        _remember(cell)
    flags = {
        "policy.path": cell.start,
        **_dataset_flags(cell.demos.data),
        "output_dir": cell.output_dir,
        **(_NO_MEMORY if not cell.method.remembers else {"craft.remember": cell.frames_per_task}),
        **cell.flags,
        **cell.method.train_flags(cell.known, cell.knob),
    }
    found = _train(cell, as_argv(flags), train)
    found["cached_bytes"] = _bytes_in(cell.anchors)
    return found | _evaluate(cell, cell)


def _remember(cell: Run) -> None:
    """Give a run's policy a memory, like `craft remember`; later stages of a sequence already have one."""
    from lerobot_craft.anchors.manifest import MEMORY_FOLDER
    from lerobot_craft.lerobot_api.datasets import open_dataset, records_success
    from lerobot_craft.lerobot_api.env_flags import RememberFlags
    from lerobot_craft.lerobot_api.pretrained import load_policy_config
    from lerobot_craft.memory.change import extended
    from lerobot_craft.memory.collect import from_dataset
    from lerobot_craft.memory.format import SourceKind, write_memory

    shutil.copytree(cell.start, cell.remembering, dirs_exist_ok=True)
    if cell.before is not None:
        return
    config = load_policy_config(cell.remembering, ("--device=cpu",))
    wanted, memory = cell.frames_per_task, None
    for known in cell.known_data:
        dataset = open_dataset(f"craft/{known.data.name}", known.data, policy_config=config)
        kind: SourceKind = "rollouts" if records_success(dataset) else "demonstrations"
        added = from_dataset(dataset, config, kind=kind, frames_per_task=wanted, seed=RememberFlags.seed)
        memory = extended(memory, added, frames_per_task=wanted, max_bytes=RememberFlags.max_bytes)
    if memory is not None:
        write_memory(memory, cell.remembering / MEMORY_FOLDER)


@_work.register
def _film(cell: Film, train: Train) -> dict[str, Any]:
    from lerobot_craft.bench.filmstrip import film

    film(cell)
    return {}


def _dataset_flags(root: Path) -> dict[str, object]:
    return {"dataset.repo_id": f"craft/{root.name}", "dataset.root": root}


def _train(cell: Cell, argv: list[str], train: Train) -> dict[str, Any]:
    from lerobot_craft.lerobot_api.train_parts import forgotten_afterwards
    from lerobot_craft.training.checkpoints import last_checkpoint

    command = shlex.join(["craft", "train", *argv])
    sys.stdout.write(f"{command}\n")
    began = time.perf_counter()
    with forgotten_afterwards(), _home(cell.anchors):
        code = train(argv)
    if code != 0 or last_checkpoint(cell.output_dir) is None:
        raise CraftError(f"`craft train` ended with code {code} and no checkpoint in {cell.output_dir}")
    return {"command": command, "train_seconds": time.perf_counter() - began, **_measured(cell.output_dir)}


@contextlib.contextmanager
def _home(directory: Path) -> Iterator[None]:
    """Keep anchors that no flag has a place for in the cell's directory instead of the user's home."""
    from lerobot_craft.training.anchor_source import HOME_VARIABLE

    before = os.environ.get(HOME_VARIABLE)
    os.environ[HOME_VARIABLE] = str(directory)
    try:
        yield
    finally:
        os.environ.pop(HOME_VARIABLE)
        if before is not None:
            os.environ[HOME_VARIABLE] = before


def _measured(output_dir: Path) -> dict[str, Any]:
    """From the run's own records: step time, and final multiplier and budget."""
    from lerobot_craft.training.journal import HISTORY_FILE, read_history, read_metrics

    windows = [line["update_s"] + line["dataloading_s"] for line in read_metrics(output_dir) if "update_s" in line]
    # The first window includes one-time costs such as torch's warm-up.
    found: dict[str, Any] = {"step_seconds": statistics.median(windows[1:] or windows) if windows else None}
    if (output_dir / HISTORY_FILE).exists():
        for row in read_history(output_dir):
            found["lambda_final"], found["eps_final"] = row.get("lambda"), row.get("epsilon")
    return found


def _player(cell: Cell, checkpoint: Path) -> Any:
    import lerobot_craft.tiny  # noqa: F401  # registers the small policies, in case this process trained none
    from lerobot_craft.anchors.teacher import check_weights
    from lerobot_craft.lerobot_api.rollouts import load_player

    player = load_player(checkpoint, cell.settings.env(cell.tasks[0]))
    if not hasattr(player.policy, "peft_config"):
        check_weights(player.policy, checkpoint)
    return player


def _evaluate(cell: Trial | Run, of: Base | Run, *, blindfold: bool = False) -> dict[str, Any]:
    """Success on all tasks; for a run also the drift from its base."""
    from lerobot_craft.bench.reference_drift import measure_drift
    from lerobot_craft.evaluation.evaluate import success

    env_of = functools.partial(cell.settings.env, blindfold=blindfold)
    player = _player(cell, of.checkpoint)
    began = time.perf_counter()
    seed = first_start(cell.base.seed)
    found: dict[str, Any] = {
        "successes": success(player, cell.tasks, env_of, episodes=cell.settings.episodes, seed=seed)
    }
    found["evaluation_seconds"] = time.perf_counter() - began
    if isinstance(of, Run):
        old = cell.scenario.old
        instructions = [find_task(task).instruction for task in old]
        found["drift"] = measure_drift(player, of.base.reference, old, instructions)
    return found
