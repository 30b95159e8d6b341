"""A whole dataset in memory: bit-identical samples of a LeRobotDataset, without reading a frame twice.

lerobot reads each sample separately, and decodes images each time: for a small policy that takes longer than the step.
Here columns are read at once, each image is decoded once and kept as bytes, and a batch takes a few index operations.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, default_collate

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch, StoredFrames, frame_table

if TYPE_CHECKING:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset


_BYTE_MODES = ("L", "RGB", "RGBA")  # PIL modes with one byte per channel, which lerobot converts to byte / 255
_IMAGES_AT_ONCE = 1024
_VIDEO_FRAMES_AT_ONCE = 64
_LEAVE_OUT = "leave out --craft.preload for this dataset"


@dataclass(frozen=True)
class Column:
    """One feature of every frame, and what a sample takes from it.

    Attributes:
        values: [N, ...].
        window: [D] frame offsets that belong to a sample; None: its own frame only.
        in_bytes: Stored as bytes, but floats in a sample.
        has_axis: Whether the window has its own axis in a sample.
    """

    values: Tensor
    window: Tensor | None = None
    in_bytes: bool = False
    has_axis: bool = True

    def at(self, rows: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """Samples [B] whose episodes start and end at rows `first` and `last`: [B, ...] or [B, D, ...]."""
        if self.window is None:
            values = self.values[rows]
        else:
            values = self.values[(rows[:, None] + self.window).clamp(first[:, None], last[:, None])]
            values = values if self.has_axis else values.squeeze(1)
        # As in torchvision's ToTensor, which lerobot uses for images.
        return values.to(torch.get_default_dtype()).div(255) if self.in_bytes else values


class Pictures:
    """Images that stay encoded and are decoded to bytes on demand.

    Args:
        dataset: As opened by lerobot.
        name: Name of the feature.
        window: [D] frame offsets that belong to a sample; None: its own frame only.
    """

    def __init__(self, dataset: "LeRobotDataset", name: str, window: Tensor | None) -> None:
        self._dataset, self._name, self._window = dataset, name, window
        self._decode = dataset.hf_dataset.features[name].decode_example
        self._cells = dataset.hf_dataset.data.column(name)

    def at(self, rows: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """As `Column.at`.

        Raises:
            CraftError: The images differ in size, or are not stored as bytes.
        """
        wanted = rows
        if self._window is not None:
            wanted = (rows[:, None] + self._window).clamp(first[:, None], last[:, None])
        different, place = wanted.unique(return_inverse=True)
        pictures = [
            _picture(self._dataset, self._name, self._decode(self._cells[row].as_py())) for row in different.tolist()
        ]
        if any(picture.shape != pictures[0].shape for picture in pictures):
            raise CraftError(f"the images {self._name} of {self._dataset.repo_id} are not all of one size")
        return torch.stack(pictures)[place]


def read_columns(dataset: "LeRobotDataset", *, keep_images: bool = True) -> dict[str, Column | Pictures | list[str]]:
    """A sample's parts in its order: videos, then the table's columns; strings are lists of N.

    Args:
        dataset: As opened by lerobot.
        keep_images: Whether to decode all images now, or on demand. Videos are always decoded.
    """
    import datasets as hf  # type: ignore[import-untyped]

    table = dataset.hf_dataset
    windows = sample_windows(dataset)
    columns: dict[str, Column | Pictures | list[str]] = {}
    for name in dataset.meta.video_keys:
        window = windows.get(name)
        # lerobot drops the axis of a single-frame window for videos, but keeps it for images.
        columns[name] = Column(_video(dataset, name), window, has_axis=window is not None and len(window) > 1)
    for name, feature in table.features.items():
        cells = table.data.column(name)
        if isinstance(feature, hf.Image) and not keep_images:
            columns[name] = Pictures(dataset, name, windows.get(name))
        elif isinstance(feature, hf.Image):
            columns[name] = Column(_images(dataset, name), windows.get(name), in_bytes=True)
        elif isinstance(feature, hf.Value) and feature.dtype == "string":
            columns[name] = cells.to_pylist()
        else:
            columns[name] = Column(numbers(dataset, name), windows.get(name))
    return columns


def sample_windows(dataset: "LeRobotDataset") -> dict[str, Tensor]:
    """Features with several frames per sample: [D] frame offsets."""
    return {name: torch.tensor(deltas) for name, deltas in (dataset.reader.delta_indices or {}).items()}


def episode_bounds(dataset: "LeRobotDataset") -> tuple[Tensor, Tensor]:
    """The first and last row of each row's episode, [N] each."""
    table = dataset.hf_dataset.data
    index, episode = (table.column(name).to_numpy().astype(np.int64) for name in ("index", "episode_index"))
    limits = (np.asarray(dataset.meta.episodes[name]) for name in ("dataset_from_index", "dataset_to_index"))
    start, end = (limit[episode] for limit in limits)
    rows = np.arange(len(index))
    first, last = rows - (index - start), rows + (end - 1 - index)
    # lerobot finds a window's frames by number. Row indices are equivalent if every episode is complete and in order:
    # then its rows agree on its start and end, and their count matches.
    lengths = np.bincount(episode, minlength=len(dataset.meta.episodes))[episode]
    whole = (last - first + 1 == lengths).all() and (first >= 0).all() and (last < len(rows)).all()
    if not (whole and (first[first] == first).all() and (episode[first] == episode).all()):
        raise CraftError(f"the frames of {dataset.repo_id} are not in the order of their episodes: {_LEAVE_OUT}")
    return torch.from_numpy(first), torch.from_numpy(last)


def numbers(dataset: "LeRobotDataset | StoredFrames", name: str) -> Tensor:
    """Values [N, ...] in the dtypes of lerobot's samples, which are torch's for Python numbers."""
    if isinstance(dataset, StoredFrames):
        return dataset.numbers(name)
    import pyarrow as pa  # type: ignore[import-untyped]
    import pyarrow.compute as pc  # type: ignore[import-untyped]

    column: Any = dataset.hf_dataset.data.column(name)
    count, empty = len(column), column.null_count
    while not pa.types.is_primitive(column.type):
        if isinstance(column.type, pa.ExtensionType):  # a matrix
            column = pa.chunked_array([chunk.storage for chunk in column.chunks])
        column = pc.list_flatten(column)
        empty += column.null_count
    shape = tuple(dataset.meta.features[name]["shape"])
    shape = () if shape == (1,) else shape  # lerobot stores a vector of length one as a number
    if empty or len(column) != count * int(np.prod(shape)):
        raise CraftError(f"{name} of {dataset.repo_id} has no value, or only a part of one, in some frames")
    values = column.to_numpy()
    kind = {"b": np.bool_, "i": np.int64, "u": np.int64}.get(values.dtype.kind, np.float32)
    return torch.from_numpy(values.astype(kind)).view(count, *shape)


def finite_numbers(dataset: "LeRobotDataset", name: str, leave_out: str = "") -> Tensor:
    """As `numbers`; NaN and infinity are refused with the first frame that holds one.

    A single one spreads to the whole model, and then nothing tells where it came from.

    Args:
        dataset: From `open_dataset`.
        name: The feature.
        leave_out: The flag that leaves episodes out, if there is one.
    """
    values = numbers(dataset, name)
    wrong = (~values.isfinite().reshape(len(values), -1).all(dim=1)).nonzero().flatten()
    if len(wrong):
        table, row = frame_table(dataset), int(wrong[0])
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        remedy = (
            f"leave their episodes out with {leave_out}"
            if leave_out
            else "delete their episodes with lerobot-edit-dataset"
        )
        raise CraftError(
            f"{name} of {dataset.repo_id} is NaN or infinite in frame {table.position[row]} of episode "
            f"{table.episode[row]}{more}: training would stop there. Repair these frames or {remedy}"
        )
    return values


def check_numbers(dataset: "LeRobotDataset", config: Any, rename_map: Mapping[str, str], leave_out: str) -> None:
    """Refuse a dataset with NaN or infinity in a vector that the policy is trained on."""
    read = {*(config.input_features or {}), *(config.output_features or {})}
    for name, feature in dataset.meta.features.items():
        if feature["dtype"].startswith("float") and rename_map.get(name, name) in read:
            finite_numbers(dataset, name, leave_out)


def _images(dataset: "LeRobotDataset", name: str) -> Tensor:
    """Images [N, C, H, W] as bytes."""
    decode = dataset.hf_dataset.features[name].decode_example
    cells = dataset.hf_dataset.data.column(name)
    pictures = picture = torch.empty(0)
    before: Any = None
    for row, encoded in enumerate(_in_blocks(cells)):
        # Identical images in a row, as from a blank camera, are decoded once.
        if encoded != before:
            before, picture = encoded, _picture(dataset, name, decode(encoded))
        if row == 0:
            pictures = torch.empty(len(cells), *picture.shape, dtype=torch.uint8)
        if picture.shape != pictures.shape[1:]:
            raise CraftError(f"the images {name} of {dataset.repo_id} are not all of one size: {_LEAVE_OUT}")
        pictures[row] = picture
    return pictures


def _in_blocks(cells: Any) -> Iterator[Any]:
    """Cells as Python objects, block by block, because they are as large as the files."""
    for start in range(0, len(cells), _IMAGES_AT_ONCE):
        yield from cells.slice(start, _IMAGES_AT_ONCE).to_pylist()


def _picture(dataset: "LeRobotDataset", name: str, image: Any) -> Tensor:
    if image.mode not in _BYTE_MODES:
        raise CraftError(
            f"the images {name} of {dataset.repo_id} are stored as {image.mode}, and --craft.preload keeps "
            f"{', '.join(_BYTE_MODES)} only: {_LEAVE_OUT}"
        )
    pixels = torch.from_numpy(np.array(image))  # [H, W] or [H, W, C]
    return pixels.view(*pixels.shape[:2], -1).permute(2, 0, 1)


def _video(dataset: "LeRobotDataset", name: str) -> Tensor:
    """Frames [N, C, H, W] as lerobot decodes them, many at a time."""
    timestamp, episode = numbers(dataset, "timestamp"), numbers(dataset, "episode_index")
    frames = torch.empty(0)
    for start, stop in _stretches(episode):
        query = {name: timestamp[start:stop].tolist()}
        decoded = dataset.reader._query_videos(query, int(episode[start]))[name]
        if start == 0:
            frames = torch.empty(len(episode), *decoded.shape[-3:], dtype=decoded.dtype)
        frames[start:stop] = decoded
    return frames


def _stretches(episode: Tensor) -> Iterator[tuple[int, int]]:
    """Row ranges within one episode, small enough to decode at once."""
    _, lengths = torch.unique_consecutive(episode, return_counts=True)
    start = 0
    for length in lengths.tolist():
        stop = start + length
        yield from ((row, min(row + _VIDEO_FRAMES_AT_ONCE, stop)) for row in range(start, stop, _VIDEO_FRAMES_AT_ONCE))
        start = stop


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
