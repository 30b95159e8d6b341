"""Frames of a plan that were read once, kept in memory: decoding a video anew at each visit would take longest."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.build import Job
from lerobot_craft.anchors.datasets import NOTHING_MADE, STATE, MadeStates, as_anchors
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.teacher.processors import normalizer_stats

KEPT_BYTES = 2**30


class FramesInMemory:
    """The plan's anchors as raw batches, demonstrated actions included; read when first asked for, kept while they fit.

    Args:
        job: The plan, its datasets, and the teacher whose statistics states are drawn from.
        made: States that the plan refers to and the frames do not hold.
        kept_bytes: How much is kept.
    """

    def __init__(self, job: Job, made: MadeStates = NOTHING_MADE, kept_bytes: int = KEPT_BYTES) -> None:
        _check_alike(job)
        self._made = made
        self._job = job
        self._state_stats = normalizer_stats(job.teacher.preprocessor).get(STATE)
        self._limit = kept_bytes
        self._kept: dict[int, RawBatch] = {}
        self._kept_bytes = 0
        self._row_bytes = 0  # of the largest frame so far

    def read(self, rows: npt.NDArray[np.int64]) -> RawBatch:
        """Anchors by their rows in the plan, such as make one batch."""
        missing = np.asarray([row for row in np.unique(rows) if int(row) not in self._kept], dtype=np.int64)
        fresh = self._read(missing) if len(missing) else {}
        return _joined([fresh[int(row)] if int(row) in fresh else self._kept[int(row)] for row in rows])

    def bytes_at_most(self, num_anchors: int) -> int:
        """Memory once all anchors have been visited, judged by the frames read so far."""
        return min(self._limit, num_anchors * self._row_bytes)

    def _read(self, rows: npt.NDArray[np.int64]) -> dict[int, RawBatch]:
        plan = self._job.plan
        datasets = [opened.dataset for opened in self._job.datasets]
        (frames,) = read_batches(datasets, [(int(plan.dataset[rows[0]]), plan.frame[rows])])
        batch = as_anchors(frames, plan, rows, self._state_stats, self._made)
        fresh = {int(row): {name: values[place] for name, values in batch.items()} for place, row in enumerate(rows)}
        size = max(_nbytes(frame) for frame in fresh.values())
        self._row_bytes = max(self._row_bytes, size)
        if self._kept_bytes + size * len(fresh) <= self._limit:
            self._kept |= fresh
            self._kept_bytes += size * len(fresh)
        return fresh


def _joined(frames: Sequence[RawBatch]) -> RawBatch:
    """Frames with the same keys -> a batch, as a data loader collates it."""
    return {
        name: torch.stack([frame[name] for frame in frames])
        if isinstance(value, Tensor)
        else [frame[name] for frame in frames]
        for name, value in frames[0].items()
    }


def _nbytes(frame: RawBatch) -> int:
    return sum(value.nbytes for value in frame.values() if isinstance(value, Tensor))


def _check_alike(job: Job) -> None:
    """A batch holds anchors of several datasets, so their observations must have the same names and sizes."""

    def observations(dataset: Any) -> dict[str, tuple[int, ...]]:
        features = dataset.meta.features
        wanted = job.teacher.config.input_features
        return {name: tuple(features[name]["shape"]) for name in sorted(wanted) if name in features}

    first, *others = [(opened.repo_id, observations(opened.dataset)) for opened in job.datasets]
    for repo_id, found in others:
        if found != first[1]:
            raise CraftError(
                f"{first[0]} has the observations {first[1]} and {repo_id} {found}: one batch of anchors cannot hold "
                "both. Use datasets with the same cameras and image sizes"
            )
