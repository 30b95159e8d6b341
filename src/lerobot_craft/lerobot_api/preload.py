"""A whole dataset in memory: bit-identical samples of a LeRobotDataset, without reading a frame twice.

lerobot reads each sample separately, and decodes images each time: for a small policy that takes longer than the step.
Here columns are read at once, each image is decoded once and kept as bytes, and a batch takes a few index operations.
"""

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, Subset

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.preload_columns import Column, read_columns
from lerobot_craft.lerobot_api.samples import Samples

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

logger = logging.getLogger(__name__)

_SHARE_OF_MEMORY = 0.5


class SamplesInMemory(Samples):
    """All samples of a dataset, in memory.

    Args:
        dataset: As opened by lerobot.

    Raises:
        CraftError: Something in it cannot be preloaded, or a sample differs from the dataset's.
    """

    def __init__(self, dataset: "LeRobotDataset") -> None:
        super().__init__(dataset, read_columns(dataset))
        if differing := self.differing_from(dataset):
            raise CraftError(
                f"--craft.preload would not give what lerobot reads for {', '.join(differing)} of {dataset.repo_id}: "
                "leave it out for this dataset"
            )

    @property
    def nbytes(self) -> int:
        """Size of all columns in memory."""
        return sum(column.values.nbytes for column in self.columns.values() if isinstance(column, Column))


def as_it_is(batch: RawBatch) -> RawBatch:
    """`collate_fn` for samples that are already a batch."""
    return batch


def preloaded(
    dataset: Any, held_out: Any | None = None, *, smaller: str = "train on fewer episodes (--dataset.episodes)"
) -> tuple[Any, Any | None]:
    """Read both datasets into memory; a `Subset` keeps its indices.

    Args:
        dataset: As opened by lerobot.
        held_out: Likewise, or a `Subset`, or None.
        smaller: Other advice if memory is short, for the message.

    Raises:
        CraftError: They need more than half of the available memory, or cannot be preloaded.
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

    copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # each local process has its own copy
    needed = copies * sum(map(bytes_needed, datasets))
    available = psutil.virtual_memory().available
    if needed > _SHARE_OF_MEMORY * available:
        raise CraftError(
            f"--craft.preload would keep {needed / 1e9:.3g} GB, more than half of the {available / 1e9:.3g} GB of "
            f"memory that are available: leave it out, or {smaller}"
        )


def bytes_needed(dataset: "LeRobotDataset") -> int:
    """Memory that a dataset needs after preloading, from its metadata only."""
    # As in samples: images as bytes, integers with 64 bits, other numbers with 32.
    widths = {"image": 1, "video": 1, "bool": 1}
    per_frame = 0
    for feature in dataset.meta.features.values():
        kind = feature["dtype"]
        width = widths.get(kind, 8 if "int" in kind else 4)
        per_frame += int(np.prod(feature["shape"])) * width
    return len(dataset) * per_frame
