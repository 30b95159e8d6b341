"""The memory of the policy that training starts from: which of its frames are held, and which are only measured."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lerobot_craft.anchors.manifest import MANIFEST_FILE, MEMORY_FOLDER
from lerobot_craft.anchors.plan import parse_old_instructions, plain
from lerobot_craft.anchors.prepare import OldFrames, old_instructions
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import policy_in
from lerobot_craft.lerobot_api.datasets import fingerprint_in, old_data_flags
from lerobot_craft.memory.dataset import as_old_data
from lerobot_craft.memory.format import Memory, memory_in
from lerobot_craft.memory.kept_out import kept_out
from lerobot_craft.training.config import CraftConfig

logger = logging.getLogger(__name__)

AUTO, OFF = "auto", "off"


@dataclass(frozen=True)
class Remembered:
    """What a run makes of a memory.

    Attributes:
        whole: As it was found; this is what the next checkpoint carries on.
        held: Frames that become anchors; None where none of the tasks to keep has any.
        measured: Frames that no step visits; None where there are none.
        instructions: Tasks to keep, also those without a frame.
        place: Where it was found.
    """

    whole: Memory
    held: Memory | None
    measured: Memory | None
    instructions: tuple[str, ...]
    place: str

    def old_frames(self, config: Any) -> OldFrames:
        """For the plan of the anchors."""
        return OldFrames(None if self.held is None else as_old_data(self.held, config), self.instructions)

    def to_measure(self) -> "Remembered | None":
        """The same with those frames that are kept out in place of those that are held."""
        if self.measured is None:
            return None
        return Remembered(self.whole, self.measured, None, self.measured.instructions, self.place)

    def line(self) -> str:
        """For the banner."""
        held, measured = (0 if part is None else len(part) for part in (self.held, self.measured))
        kept_out = f"{measured} more are kept out of training to measure on" if measured else "none is kept out"
        return f"Memory: {held} old frames to hold, {kept_out}; from {self.place}"


def find_memory(flag: str, checkpoint: Path) -> Path | None:
    """The folder of the memory that `--craft.memory` means, beside the policy of `checkpoint`.

    Raises:
        CraftError: A path was given and there is no memory.
    """
    if flag == OFF:
        return None
    if flag == AUTO:
        return memory_in(checkpoint)
    given = Path(flag)
    for place in (given, policy_in(given) / MEMORY_FOLDER):
        if (place / MANIFEST_FILE).is_file():
            return place
    raise CraftError(
        f"--craft.memory={flag}: there is no memory. Give a checkpoint that has a {MEMORY_FOLDER} folder (make one "
        f"with `craft remember {flag} --dataset.repo_id=NAME`), or --craft.memory={AUTO} or {OFF}."
    )


def open_remembered(craft: CraftConfig, memory: Memory, directory: Path, new_tasks: Sequence[str]) -> Remembered | None:
    """What a run makes of a memory; None where it has no task that is to be kept.

    Args:
        craft: `--craft.*`.
        memory: Of the policy before fine-tuning.
        directory: Where it was found.
        new_tasks: Instructions of the new task's data: these are learned, not held.
    """
    keep = _tasks_to_keep(craft, memory, new_tasks)
    if not keep:
        logger.info("the memory in %s has no task but the new one: nothing of it is held", directory)
        return None
    rows = torch.cat([memory.rows_of(task) for task in memory.instructions if task in keep] or [torch.empty(0).long()])
    if not len(rows):
        return Remembered(memory, None, None, tuple(keep), str(directory))
    usable = memory.take(rows)
    apart = kept_out(usable) if craft.probe_anchors else torch.zeros(len(usable), dtype=torch.bool)
    apart &= ~_trained_on_elsewhere(craft, usable)
    held, measured = ((~apart).nonzero().squeeze(1), apart.nonzero().squeeze(1))
    return Remembered(
        memory, usable.take(held), usable.take(measured) if len(measured) else None, tuple(keep), str(directory)
    )


def _trained_on_elsewhere(craft: CraftConfig, memory: Memory) -> Tensor:
    """Frames whose dataset is also given as --craft.old_dataset, bool [n]: training may visit them by that way."""
    with old_data_flags():
        given = {
            fingerprint_in(repo_id, root, craft.old_dataset.revision)
            for repo_id, root in craft.old_dataset.addresses("craft.old_dataset")
        }
    shared = torch.tensor([source.fingerprint in given for source in memory.sources])
    if shared.any():
        logger.info(
            "the memory has frames of --craft.old_dataset: these are not used to measure, as they are trained on"
        )
    return shared[memory.dense("dataset").long()]


def _tasks_to_keep(craft: CraftConfig, memory: Memory, new_tasks: Sequence[str]) -> list[str]:
    learned = {plain(task) for task in new_tasks}
    if craft.old_instructions is not None:
        return [_as_remembered(task, memory) for task in parse_old_instructions(craft.old_instructions)]
    for task in memory.instructions:
        if plain(task) in learned:
            logger.info("the memory also has the new task, %r: it is learned, so its frames are not held", task)
    keep = [task for task in memory.instructions if plain(task) not in learned]
    if craft.old_dataset.repo_id:
        keep += old_instructions(craft.build_config(Path(), DatasetFlags(), seed=0))
    return list(dict.fromkeys(keep))


def _as_remembered(task: str, memory: Memory) -> str:
    """An instruction that the user gave, as the memory spells it; a warning where the memory has none like it."""
    for known in memory.instructions:
        if plain(known) == plain(task):
            return known
    logger.warning(
        "--craft.old_instructions names %r, which the memory has no frame of: it is held in frames of the new task "
        "only, and nothing verifies it",
        task,
    )
    return task
