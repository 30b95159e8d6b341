"""The memory that every checkpoint of a run carries: what was there, and frames of the new task. Made once per run."""

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from lerobot_craft.anchors.files import plain_errors
from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.anchors.plan import parse_old_instructions
from lerobot_craft.anchors.whole_directory import replaced
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import old_data_flags, open_dataset
from lerobot_craft.memory.change import extended
from lerobot_craft.memory.collect import from_dataset
from lerobot_craft.memory.format import Memory, contents, memory_in, read_memory, write_memory
from lerobot_craft.policies import adapter_for
from lerobot_craft.training.config import CraftConfig

logger = logging.getLogger(__name__)

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
    with plain_errors(directory), replaced(directory) as temporary:
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
            f"{error} (this is about the memory that checkpoints carry: --craft.remember=0 adds no frames to it)"
        ) from error


def _of_old_datasets(craft: CraftConfig, config: Any, seed: int) -> Memory | None:
    """Frames of the old data that the run is given: the next one shall not need them."""
    only = None if craft.old_instructions is None else parse_old_instructions(craft.old_instructions)
    memory: Memory | None = None
    for repo_id, root in craft.old_dataset.addresses("craft.old_dataset"):
        with old_data_flags():
            opened = open_dataset(repo_id, root, craft.old_dataset.revision, policy_config=config)
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
