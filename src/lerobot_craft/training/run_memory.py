"""The memory of a run: the one of the policy that training starts from, and the one that every checkpoint carries.

The memory of the policy that training starts from: which of its frames are held, and which are only measured.

The memory that every checkpoint of a run carries: what was there, and frames of the new task. Made once per run.
"""

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from lerobot_craft.anchors.build import OldFrames, old_instructions
from lerobot_craft.anchors.manifest import MANIFEST_FILE, MEMORY_FOLDER
from lerobot_craft.anchors.plan import parse_old_instructions, plain
from lerobot_craft.anchors.recipe import OLD_DATASET
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import plain_errors, replaced_directory
from lerobot_craft.lerobot_api import policy_in
from lerobot_craft.lerobot_api.datasets import fingerprint_in, open_dataset
from lerobot_craft.memory.change import extended
from lerobot_craft.memory.collect import from_dataset, kept_out
from lerobot_craft.memory.dataset import as_old_data
from lerobot_craft.memory.format import Memory, contents, memory_in, read_memory, write_memory
from lerobot_craft.policies import adapter_for
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
    given = {
        fingerprint_in(repo_id, root, craft.old_dataset.revision, named=OLD_DATASET)
        for repo_id, root in craft.old_dataset.addresses(OLD_DATASET)
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
        keep += old_instructions(craft)
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


BEFORE = f"{MEMORY_FOLDER}_before"


@dataclass(frozen=True)
class Carried:
    """The memory of a run's checkpoints.

    Attributes:
        directory: Where it is kept; checkpoints have links to its files.
        memory: The same.
    """

    directory: Path
    memory: Memory

    def lines(self) -> list[str]:
        """How many pictures of which datasets travel with the weights."""
        return contents(self.memory)


def make_carried(cfg: Any, craft: CraftConfig, config: Any, before: Memory | None, dataset: Any) -> Carried | None:
    """Make the memory of this run's checkpoints, or find it where a run goes on; for the main process only.

    Args:
        cfg: lerobot's settings.
        craft: `--craft.*`.
        config: The policy's.
        before: The memory of the policy before fine-tuning.
        dataset: The new task's, as lerobot opened it.
    """
    directory = cfg.output_dir / MEMORY_FOLDER
    if cfg.resume:
        saved = memory_in(Path(cfg.checkpoint_path) / "pretrained_model")
        if not directory.is_dir() and saved is not None:
            link_files(saved, directory)
        if directory.is_dir():
            return Carried(directory, read_memory(directory))
    memory = _grown(cfg, craft, config, before, dataset)
    if memory is None:
        return None
    write_memory(memory, directory)
    return Carried(directory, memory)


def link_files(source: Path, directory: Path) -> None:
    """A memory's folder once more, by hard links where the filesystem has them: no file of it is ever changed."""
    with plain_errors(directory), replaced_directory(directory) as temporary:
        for file in sorted(source.iterdir()):
            try:
                os.link(file, temporary / file.name)
            except OSError:  # another filesystem, or one without links
                shutil.copyfile(file, temporary / file.name)


def _grown(cfg: Any, craft: CraftConfig, config: Any, before: Memory | None, dataset: Any) -> Memory | None:
    if craft.remember == 0 or not _can_be_remembered(config, dataset):
        return before
    limits = {"frames_per_task": craft.remember, "max_bytes": craft.memory_bytes}
    seed = int(cfg.seed or 0)
    memory = before
    try:
        if before is None and craft.old_dataset.repo_id:
            memory = _of_old_datasets(craft, config, seed)
        new = open_dataset(
            cfg.dataset.repo_id,
            cfg.dataset.root,
            cfg.dataset.revision,
            policy_config=config,
            episodes=cfg.dataset.episodes,
        )
        added = from_dataset(
            new,
            config,
            kind="training",
            frames_per_task=craft.remember,
            seed=seed,
            revision=cfg.dataset.revision,
            rename_map=cfg.rename_map,
        )
        return extended(memory, added, **limits)
    except CraftError as error:
        raise CraftError(
            f"{error.text} (this is about the memory that checkpoints carry: --craft.remember=0 adds no frames to it)"
        ) from error


def _of_old_datasets(craft: CraftConfig, config: Any, seed: int) -> Memory | None:
    """Frames of the old data that the run is given: the next one shall not need them."""
    only = None if craft.old_instructions is None else parse_old_instructions(craft.old_instructions)
    memory: Memory | None = None
    for repo_id, root in craft.old_dataset.addresses(OLD_DATASET):
        opened = open_dataset(repo_id, root, craft.old_dataset.revision, policy_config=config, named=OLD_DATASET)
        added = from_dataset(
            opened,
            config,
            kind="demonstrations",
            frames_per_task=craft.remember,
            seed=seed,
            revision=craft.old_dataset.revision,
            only=only,
        )
        memory = extended(memory, added, frames_per_task=craft.remember, max_bytes=craft.memory_bytes)
    return memory


def _can_be_remembered(config: Any, dataset: Any) -> bool:
    if isinstance(dataset, IterableDataset):
        logger.warning("frames of a streamed dataset are not remembered: train without --dataset.streaming for that")
        return False
    try:
        adapter_for(config)
    except CraftError as error:
        logger.warning("frames of the new task are not remembered: %s", error)
        return False
    return True
