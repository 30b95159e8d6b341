"""Whole batches of a dataset's samples from its columns; lerobot reads one sample at a time, a query per window."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.preload_columns import episode_bounds, sample_windows

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

_TASK = "task"


class SampleColumn(Protocol):
    """One feature of every frame."""

    def at(self, rows: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Samples [B] whose episodes start and end at rows `first` and `last`: [B, ...] or [B, D, ...]."""
        ...


class Samples(Dataset[RawBatch]):
    """The samples of a dataset.

    A DataLoader that finds `__getitems__` requests a whole batch, already collated, so `collate_fn` has nothing to do.

    Args:
        dataset: As opened by lerobot.
        columns: A sample's parts in its order; strings are lists.

    Raises:
        CraftError: The dataset's frames are not in episode order.
    """

    def __init__(self, dataset: "LeRobotDataset", columns: Mapping[str, SampleColumn | list[str]]) -> None:
        self.meta, self.columns = dataset.meta, columns
        self._first, self._last = episode_bounds(dataset)
        self._windows = sample_windows(dataset)
        names = dataset.meta.tasks.index.tolist()
        self._instructions = [names[task] for task in dataset.hf_dataset.data.column("task_index").to_pylist()]

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, row: int) -> RawBatch:
        return {name: values[0] for name, values in self.__getitems__([row]).items()}

    def __getitems__(self, rows: Sequence[int]) -> RawBatch:
        """Samples as one batch, with lerobot's names in lerobot's order."""
        at = torch.tensor(rows)  # [B]
        first, last = self._first[at], self._last[at]
        batch: RawBatch = {
            name: [column[row] for row in rows] if isinstance(column, list) else column.at(at, first, last)
            for name, column in self.columns.items()
        }
        for name, window in self._windows.items():
            wanted = at[:, None] + window  # [B, D]
            batch[f"{name}_is_pad"] = (wanted < first[:, None]) | (wanted > last[:, None])
        batch[_TASK] = [self._instructions[row] for row in rows]
        return batch

    def differing_from(
        self, dataset: "LeRobotDataset", collate: Callable[[list[Any]], RawBatch] = default_collate, *, samples: int = 8
    ) -> list[str]:
        """Features whose values differ from lerobot's, bit by bit, in a few samples, including padded windows.

        Args:
            dataset: As opened by lerobot.
            collate: Turns its samples into a batch.
            samples: Number of random samples, besides the first, the last and the last of an episode.
        """
        drawn = np.random.default_rng(0).integers(len(self), size=samples).tolist()
        rows = [0, *drawn, int(self._last[drawn[0]]), len(self) - 1]
        expected, found = collate([dataset[row] for row in rows]), self.__getitems__(rows)
        differing = [name for name in expected if name not in found or not _same(expected[name], found[name])]
        return differing + [name for name in found if name not in expected]


def _same(expected: Any, found: Any) -> bool:
    if not isinstance(expected, Tensor):
        return bool(expected == found)
    same_form = isinstance(found, Tensor) and (found.dtype, found.shape) == (expected.dtype, expected.shape)
    # Compare bytes, so that NaN equals NaN.
    return same_form and bool(found.contiguous().numpy().tobytes() == expected.contiguous().numpy().tobytes())
