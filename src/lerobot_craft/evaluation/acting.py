"""What a policy does in given frames under every instruction, and how that differs from what it did before."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lerobot_craft.anchors.observations import spread_of
from lerobot_craft.anchors.plan import choose_frames
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.anchors.teacher import Teacher, executed_chunk, normalizer_stats
from lerobot_craft.anchors.walks import ACTION
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.intervals import FloatArray
from lerobot_craft.evaluation.listening import compare
from lerobot_craft.lerobot_api.datasets import RawBatch, frame_table
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.policies.taps import embedded_once

PASSES = 3  # over all frames and instructions: before, before with other noise, after
_NOISE, _OTHER_NOISE = 0, 1


@dataclass
class ListenFlags:
    """What `craft listen` is asked for, beside the two checkpoints."""

    # Frames to act in, such as the new task's. Their own instructions count as learned.
    dataset: DatasetFlags = field(default_factory=DatasetFlags)
    # What else to tell the policies: with ; between them, or a file with one per line. Unset: what AFTER was told to
    # keep, and the instructions of both memories.
    instructions: str | None = None
    # Frames, spread over tasks, episodes and phases.
    frames: int = 64
    # Frames per forward pass.
    batch_size: int = 32
    # Of the choice of frames.
    seed: int = 0
    # Gets listening.json and report.html.
    output_dir: Path = Path("outputs/listen")

    def __post_init__(self) -> None:
        for name in ("frames", "batch_size"):
            if getattr(self, name) < 1:
                raise CraftError(f"--{name} must be at least 1; got {getattr(self, name)}")


@dataclass(frozen=True)
class Frames:
    """Frames of a dataset, as a policy reads them.

    Attributes:
        batches: Raw, as `read_batches` gives them.
        camera_keys: The dataset's cameras.
        episode: int64 [F], the episode of each.
    """

    batches: Sequence[RawBatch]
    camera_keys: Sequence[str]
    episode: npt.NDArray[np.int64]


def take_frames(
    teacher: Teacher,
    dataset: Any,
    count: int,
    batch_size: int,
    seed: int,
    rename_map: Mapping[str, str] | None = None,
) -> Frames:
    """`count` frames of a dataset, or all that it has, spread over tasks, episodes and phases.

    Raises:
        CraftError: The dataset lacks what the policy reads.
    """
    masks = adapter_for(teacher.config).masks_missing_cameras(teacher.policy)
    require_features(
        teacher.config,
        dataset.meta.features,
        dataset=dataset.repo_id,
        masks_missing_cameras=masks,
        rename_map=rename_map,
    )
    table = frame_table(dataset)
    rows = np.sort(choose_frames(table, count, seed))
    parts = [rows[start : start + batch_size] for start in range(0, len(rows), batch_size)]
    batches = list(read_batches([dataset], [(0, part) for part in parts]))
    return Frames(batches, dataset.meta.camera_keys, table.episode[rows])


def actions_under(
    teacher: Teacher,
    frames: Frames,
    instructions: Sequence[str],
    seed: int,
    progress: Callable[[int], object] = lambda done: None,
) -> FloatArray:
    """What a policy does in every frame under every instruction [I, F, H, A], as the robot executes it.

    Args:
        teacher: The policy.
        frames: Where it acts.
        instructions: What it is told.
        seed: Of its noise, which is the same for all instructions.
        progress: Told how many more frames are done.
    """
    adapter, policy = adapter_for(teacher.config), teacher.policy
    if not adapter.reads_instruction:
        raise CraftError(f"{teacher.config.type} reads no instruction, so it cannot listen to one")
    embedder = adapter.image_embedder(unwrapped(policy))
    heard: list[list[torch.Tensor]] = [[] for _ in instructions]
    for number, raw in enumerate(frames.batches):
        size = len(raw["task"])
        observed = {key: value for key, value in raw.items() if key.startswith("observation.")}
        # The images are the same under every instruction.
        with mode(policy, train=False), nullcontext() if embedder is None else embedded_once(embedder.module):
            for instruction, chunks in zip(instructions, heard, strict=True):
                told = {**observed, "task": [instruction] * size}
                batch = policy_batch(told, frames.camera_keys, teacher.preprocessor)
                chunks.append(executed_chunk(teacher, policy, batch, (seed, number)))
                progress(size)
    return torch.stack([torch.cat(chunks) for chunks in heard]).double().numpy()


def listen(
    before: Teacher,
    after: Teacher,
    frames: Frames,
    instructions: Sequence[str],
    learned: Sequence[str],
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """The fields of `Listening` that are measured.

    Args:
        before: The policy before fine-tuning.
        after: The same after it.
        frames: Where both act.
        instructions: What they are told.
        learned: Those of them that fine-tuning was to change.
        progress: Told how many more frames are done.

    Raises:
        CraftError: The two policies do not act alike, so that their actions cannot be compared.
    """
    first = actions_under(before, frames, instructions, _NOISE, progress)
    again = actions_under(before, frames, instructions, _OTHER_NOISE, progress)
    second = actions_under(after, frames, instructions, _NOISE, progress)
    if first.shape != second.shape:
        raise CraftError(
            f"the policy before acts in chunks of {first.shape[2]} x {first.shape[3]} numbers, the one after in "
            f"{second.shape[2]} x {second.shape[3]}: compare two checkpoints of one policy"
        )
    return compare(
        first,
        again,
        second,
        frames.episode,
        spread_of_actions(before, first),
        [name in learned for name in instructions],
    )


def spread_of_actions(teacher: Teacher, actions: FloatArray) -> FloatArray:
    """Standard deviation [A] of the actions that a policy was trained on; of its own actions if it does not say."""
    known = normalizer_stats(teacher.postprocessor).get(ACTION)
    spread: FloatArray = actions.std(axis=(0, 1, 2)) if known is None else spread_of(known).double().numpy()
    return spread
