"""Read chosen frames of datasets in batches, ahead of the consumer."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, DataLoader, default_collate

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch, StoredFrames
from lerobot_craft.lerobot_api.preload import Samples, read_columns

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

type Readable = "LeRobotDataset | Samples | StoredFrames"

_BATCHES_AHEAD = 2
# Reading by columns reads the numbers of the whole dataset and compares a few samples with lerobot's, which must pay
# off. One frame read by lerobot costs as much as the numbers of some thousand frames.
_FEWEST_FRAMES, _MOST_READ_FOR_ONE, _COMPARED = 16, 200, 2


def read_batches(
    datasets: Sequence[Readable],
    batches: Sequence[tuple[int, Sequence[int] | npt.NDArray[np.int64]]],
    num_workers: int = 0,
) -> Iterator[RawBatch]:
    """Batches of frames in the given order, read ahead while the caller computes.

    They equal the batches of `lerobot-train`'s DataLoader before the preprocessor, except that color images are always
    uint8. lerobot returns those of image datasets as floats, which are exactly uint8 / 255.

    Args:
        datasets: From `open_dataset`, preloaded, or stored frames.
        batches: For each batch, its dataset's position and rows of that dataset's `frame_table`.
        num_workers: Reader processes, each of which must import lerobot; 0: read in one thread of this process.
    """
    collate = _Collate.of(datasets)
    wanted = [(dataset, [int(index) for index in indices]) for dataset, indices in batches]
    if num_workers == 0:
        return _read_in_thread(datasets, wanted, collate)
    joined: ConcatDataset[Any] = ConcatDataset(datasets)
    starts = [0, *joined.cumulative_sizes]
    loader = DataLoader(
        joined,
        batch_sampler=[[starts[dataset] + index for index in indices] for dataset, indices in wanted],
        num_workers=num_workers,
        collate_fn=collate,
        prefetch_factor=_BATCHES_AHEAD,
        multiprocessing_context="spawn",  # as in lerobot-train: forked video decoders and threads can hang
        generator=torch.Generator(),  # otherwise the DataLoader would draw from the global generator
    )
    return iter(loader)


def _read_in_thread(
    datasets: Sequence[Readable], wanted: list[tuple[int, list[int]]], collate: "_Collate"
) -> Iterator[RawBatch]:
    frames = [0] * len(datasets)
    for dataset, indices in wanted:
        frames[dataset] += len(indices)
    read = [_reader(dataset, count, collate) for dataset, count in zip(datasets, frames, strict=True)]
    # One thread, because lerobot's open decoders must not be shared.
    reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read_batches")
    try:
        ahead: deque[Future[RawBatch]] = deque()
        for dataset, indices in wanted:
            ahead.append(reader.submit(read[dataset], indices))
            if len(ahead) > _BATCHES_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        reader.shutdown(cancel_futures=True)


def _reader(dataset: Readable, frames: int, collate: "_Collate") -> Callable[[list[int]], RawBatch]:
    """A function that reads batches of one dataset; `frames` is the total number of frames needed.

    lerobot decodes the images of every frame in a sample's windows, even if only actions need the windows. For images
    stored one by one, columns take a tenth of the time. lerobot reads whatever columns cannot.
    """

    def by_lerobot(rows: list[int]) -> RawBatch:
        return collate([dataset[row] for row in rows])

    meta = dataset.meta
    if isinstance(dataset, Samples | StoredFrames) or meta.video_keys or meta.depth_keys or meta.has_language_columns:
        return by_lerobot
    if frames < _FEWEST_FRAMES or len(dataset) > frames * _MOST_READ_FOR_ONE:
        return by_lerobot
    with suppress(CraftError):
        samples = Samples(dataset, read_columns(dataset, keep_images=False))
        if not samples.differing_from(dataset, collate, samples=_COMPARED):
            return lambda rows: _by_columns(samples, rows) or by_lerobot(rows)
    return by_lerobot


def _by_columns(samples: Samples, rows: list[int]) -> RawBatch | None:
    with suppress(CraftError):  # an image of this batch differs in form
        return samples.__getitems__(rows)
    return None


@dataclass(frozen=True)
class _Collate:
    """Collates samples, with color images as uint8; a class because it must be picklable for workers."""

    colour_cameras: tuple[str, ...]
    has_language_columns: bool

    @classmethod
    def of(cls, datasets: Sequence[Readable]) -> "_Collate":
        metas = [dataset.meta for dataset in datasets]
        cameras = {key for meta in metas for key in meta.camera_keys if key not in meta.depth_keys}
        return cls(tuple(sorted(cameras)), any(meta.has_language_columns for meta in metas))

    def __call__(self, samples: list[Any]) -> RawBatch:
        from lerobot.utils.collate import lerobot_collate_fn

        batch: RawBatch = lerobot_collate_fn(samples) if self.has_language_columns else default_collate(samples)
        for camera in self.colour_cameras:
            if camera in batch and batch[camera].is_floating_point():
                batch[camera] = (batch[camera] * 255.0).round().to(torch.uint8)
        return batch
