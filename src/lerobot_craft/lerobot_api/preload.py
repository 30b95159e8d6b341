"""A whole dataset in memory: the samples that a LeRobotDataset gives, to the bit, without reading a frame twice.

lerobot reads each sample by itself: rows of a memory-mapped table, their images decoded anew, one query per window. For
a small policy that takes longer than the training step. Here columns are read at once, each image is decoded once and
kept as the bytes that it was, and a batch is a few index operations.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.preload_columns import Column, episode_bounds, read_columns, sample_windows

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

logger = logging.getLogger(__name__)

_TASK = "task"
_SAMPLES_COMPARED = 8
_SHARE_OF_MEMORY = 0.5


class SamplesInMemory(Dataset[RawBatch]):
    """The samples of a dataset, all of them in memory.

    A DataLoader that finds `__getitems__` asks for a whole batch at once; it comes collated, so its `collate_fn` has
    nothing left to do (`as_it_is`).

    Args:
        dataset: As lerobot opened it.

    Raises:
        CraftError: It has something in it that cannot be kept, or a sample is not what the dataset gives.
    """

    def __init__(self, dataset: "LeRobotDataset") -> None:
        self.meta = dataset.meta
        self._first, self._last = episode_bounds(dataset)
        self._columns = read_columns(dataset)
        self._windows = sample_windows(dataset)
        names = dataset.meta.tasks.index.tolist()
        self._instructions = [names[task] for task in dataset.hf_dataset.data.column("task_index").to_pylist()]
        self._compare(dataset)

    def __len__(self) -> int:
        return len(self._first)

    @property
    def nbytes(self) -> int:
        """Memory of all columns."""
        return sum(column.values.nbytes for column in self._columns.values() if isinstance(column, Column))

    def __getitem__(self, row: int) -> RawBatch:
        return {name: values[0] for name, values in self.__getitems__([row]).items()}

    def __getitems__(self, rows: Sequence[int]) -> RawBatch:
        """Samples as one batch, with lerobot's names in lerobot's order."""
        at = torch.tensor(rows)  # [B]
        first, last = self._first[at], self._last[at]
        batch: RawBatch = {
            name: column.at(at, first, last) if isinstance(column, Column) else [column[row] for row in rows]
            for name, column in self._columns.items()
        }
        for name, window in self._windows.items():
            wanted = at[:, None] + window  # [B, D]
            batch[f"{name}_is_pad"] = (wanted < first[:, None]) | (wanted > last[:, None])
        batch[_TASK] = [self._instructions[row] for row in rows]
        return batch

    def _compare(self, dataset: "LeRobotDataset") -> None:
        """Refuse unless a few samples are lerobot's, bit by bit; those at episodes' ends have padded windows."""
        drawn = np.random.default_rng(0).integers(len(self), size=_SAMPLES_COMPARED).tolist()
        rows = [0, *drawn, int(self._last[drawn[0]]), len(self) - 1]
        expected, found = default_collate([dataset[row] for row in rows]), self.__getitems__(rows)
        differing = [name for name in expected if name not in found or not _same(expected[name], found[name])]
        differing += [name for name in found if name not in expected]
        if differing:
            raise CraftError(
                f"--craft.preload would not give what lerobot reads for {', '.join(differing)} of {dataset.repo_id}: "
                "leave it out for this dataset"
            )


def as_it_is(batch: RawBatch) -> RawBatch:
    """The `collate_fn` for samples that come as a batch."""
    return batch


def preloaded(
    dataset: Any, held_out: Any | None = None, *, smaller: str = "train on fewer episodes (--dataset.episodes)"
) -> tuple[Any, Any | None]:
    """Both datasets, read into memory; a `Subset` keeps its choice.

    Args:
        dataset: As lerobot opened it.
        held_out: The same, or a `Subset` of it, or None.
        smaller: What else helps where memory is short, for the message.

    Raises:
        CraftError: They need more than half of the memory that is available, or cannot be kept.
    """
    whole = held_out.dataset if isinstance(held_out, Subset) else held_out
    both = [dataset] if whole is None else [dataset, whole]
    for one in both:
        _refuse_what_cannot_be_kept(one)
    _check_memory(both, smaller)
    samples, *others = [_read(one) for one in both]
    if not others:
        return samples, None
    return samples, Subset(others[0], held_out.indices) if isinstance(held_out, Subset) else others[0]


def _read(dataset: "LeRobotDataset") -> SamplesInMemory:
    began = time.perf_counter()
    samples = SamplesInMemory(dataset)
    logger.info(
        "preloaded %d frames of %s: %.1f MB in %.1f s; no workers are needed for them, --num_workers is not used",
        *(len(samples), dataset.repo_id, samples.nbytes / 1e6, time.perf_counter() - began),
    )
    return samples


def _refuse_what_cannot_be_kept(dataset: Any) -> None:
    if isinstance(dataset, IterableDataset):
        raise CraftError(
            "--craft.preload reads the whole dataset into memory, and with --dataset.streaming=true it is never there "
            "whole: leave out one of the two"
        )
    if dataset.image_transforms is not None:
        raise CraftError(
            "--craft.preload keeps images as they are, and --dataset.image_transforms changes them anew at every "
            "visit: leave out one of the two"
        )
    meta = dataset.meta
    unknown = "language columns" if meta.has_language_columns else "depth cameras" if meta.depth_keys else None
    if unknown is not None:
        raise CraftError(
            f"the dataset {dataset.repo_id} has {unknown}, which --craft.preload cannot keep: leave it out for this "
            "dataset"
        )


def _check_memory(datasets: Sequence["LeRobotDataset"], smaller: str) -> None:
    import psutil  # type: ignore[import-untyped]

    copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each process of this machine has its own
    needed = copies * sum(map(bytes_needed, datasets))
    available = psutil.virtual_memory().available
    if needed > _SHARE_OF_MEMORY * available:
        raise CraftError(
            f"--craft.preload would keep {needed / 1e9:.3g} GB, more than half of the {available / 1e9:.3g} GB of "
            f"memory that are available: leave it out, or {smaller}"
        )


def bytes_needed(dataset: "LeRobotDataset") -> int:
    """Memory that a dataset takes once it is read, told from its metadata alone."""
    # Images are kept in bytes, whole numbers in 64 bits and others in 32, as samples have them.
    widths = {"image": 1, "video": 1, "bool": 1}
    per_frame = 0
    for feature in dataset.meta.features.values():
        kind = feature["dtype"]
        width = widths.get(kind, 8 if "int" in kind else 4)
        per_frame += int(np.prod(feature["shape"])) * width
    return len(dataset) * per_frame


def _same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(expected == found)
    same_form = isinstance(found, Tensor) and (found.dtype, found.shape) == (expected.dtype, expected.shape)
    # Bytes, so that a NaN is equal to itself.
    return same_form and bool(found.contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes())
