"""The anchors of a plan as rows: old frames, new frames under old instructions, and the teacher's walks."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lerobot_craft.anchors.frames import choose_frames, share_out
from lerobot_craft.lerobot_api.stored_frames import FrameTable

type Source = tuple[FrameTable, Sequence[str]]  # a dataset's frames, and the instructions that its tasks index

# Random streams under the plan's seed. numpy treats [seed, 1] and [seed, 1, 0] as the same stream.
_OLD, _NEW, ROWS, _WALKS, _NEAR = 1, 2, 3, 4, 5
# Noise on states between two old frames, in standard deviations: turns a line into a tube.
BETWEEN_JITTER = 0.05

ANCHOR = np.dtype(
    [
        ("dataset", np.int64),
        ("frame", np.int64),
        ("instruction", np.int64),
        ("cross", np.bool_),
        ("drawn", np.bool_),
        ("jitter", np.float64),
        ("walk", np.int64),
        ("walk_step", np.int64),
        ("mate", np.int64),
    ]
)


def dataset_anchors(
    old: Sequence[Source], keep: tuple[str, ...], n: int, seed: int, first: int = 0
) -> npt.NDArray[np.void]:
    """Old frames under their own instructions; the first `first` datasets give all frames if there is room."""
    table, dataset, frame = _join(old, keep)
    rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    for of_first in (True, False):
        wanted = np.flatnonzero((table.task >= 0) & ((dataset < first) == of_first))
        chosen = choose_frames(table.take(wanted), n - len(rows), [seed, _OLD])
        rows = np.concatenate([rows, wanted[chosen]])
    anchors = _blank(len(rows))
    anchors["dataset"], anchors["frame"], anchors["instruction"] = dataset[rows], frame[rows], table.task[rows]
    return anchors


class Walking(NamedTuple):
    """Share of the cross anchors that lie on the teacher's walks, and anchors per walk."""

    share: float
    length: int

    def walks(self, anchors: int) -> int:
        """Number of walks among `anchors`; at least one if any are wanted and one fits."""
        wanted = round(self.share * anchors / self.length)
        return min(max(wanted, 1), anchors // self.length) if self.share else 0


def cross_anchors(
    new: Sequence[Source],
    first: int,
    instructions: int,
    n: int,
    drawn: float,
    jitter: float,
    walking: Walking,
    seed: int,
    near: npt.NDArray[np.void] | None = None,
) -> npt.NDArray[np.void]:
    """Frames chosen evenly for each instruction, so that each sees all tasks, episodes and phases.

    `near` holds old frames as anchors. Instructions that have some use them instead of the teacher's statistics.
    """
    table, dataset, frame = _join(new, present(new))
    # Walks reuse the same few first frames, so only the other anchors are limited by the number of frames.
    still = 1 - walking.share
    capacity = np.full(instructions, int(len(table) / still) if still else n)
    quotas = share_out(n, capacity, np.random.default_rng([seed, _NEW]))
    parts, walks = [], 0
    for instruction, quota in enumerate(quotas):
        walked = _walks(table, walking.walks(int(quota)), walking.length, walks, drawn, [seed, _WALKS, instruction + 1])
        rows = choose_frames(table, int(quota) - len(walked), [seed, _NEW, instruction + 1])
        stood = _blank(len(rows))
        stood["frame"] = rows
        order = np.random.default_rng([seed, ROWS, instruction + 1]).permutation(len(rows))
        stood["drawn"][order[: round(drawn * len(rows))]] = True
        stood["jitter"] = np.where(stood["drawn"], 0.0, jitter)
        anchors = np.concatenate([stood, walked])
        rows = anchors["frame"]
        anchors["dataset"], anchors["frame"], anchors["cross"] = first + dataset[rows], frame[rows], True
        anchors["instruction"] = instruction
        if near is not None and len(mine := near[near["instruction"] == instruction]):
            _go_near(anchors, mine, np.random.default_rng([seed, _NEAR, instruction + 1]))
        parts.append(anchors)
        walks += len(walked) // walking.length
    return np.concatenate(parts)


def _go_near(anchors: npt.NDArray[np.void], old: npt.NDArray[np.void], rng: np.random.Generator) -> None:
    """In place: put drawn anchors between two old frames of one dataset, or on a walk from an old frame."""
    drawn = anchors["drawn"].copy()
    walked = anchors["walk"] >= 0
    _, number = np.unique(anchors["walk"][drawn & walked], return_inverse=True)
    chosen = np.empty(len(anchors), dtype=np.int64)
    # A random round-robin: all old frames are used equally often.
    turn = rng.permutation(len(old))
    chosen[drawn & walked] = turn[number % len(old)]
    chosen[drawn & ~walked] = turn[np.arange((drawn & ~walked).sum()) % len(old)]
    for name in ("dataset", "frame"):
        anchors[name][drawn] = old[name][chosen[drawn]]
    anchors["drawn"] = False
    between = np.flatnonzero(drawn & ~walked)
    anchors["jitter"][between] = BETWEEN_JITTER
    for dataset in np.unique(anchors["dataset"][between]):
        rows = between[anchors["dataset"][between] == dataset]
        anchors["mate"][rows] = rng.choice(old["frame"][old["dataset"] == dataset], size=len(rows))


def _walks(table: FrameTable, n: int, length: int, first: int, drawn: float, seed: list[int]) -> npt.NDArray[np.void]:
    """Walks from first frames of episodes, numbered from `first`. A walk's anchors are all drawn or all not."""
    rng = np.random.default_rng(seed)
    begins = np.flatnonzero(table.position == 0)
    anchors = _blank(n * length)
    anchors["frame"] = np.repeat(begins[rng.integers(len(begins), size=n)], length)
    anchors["drawn"] = np.repeat(rng.permutation(n) < round(drawn * n), length)
    anchors["walk"] = first + np.repeat(np.arange(n), length)
    anchors["walk_step"] = np.tile(np.arange(length), n)
    return anchors


def _blank(n: int) -> npt.NDArray[np.void]:
    anchors = np.zeros(n, dtype=ANCHOR)
    anchors["walk"] = anchors["mate"] = -1
    return anchors


def present(sources: Sequence[Source]) -> tuple[str, ...]:
    """Instructions that have a frame, without duplicates, in dataset order."""
    return tuple(dict.fromkeys(names[task] for table, names in sources for task in np.unique(table.task)))


def _join(
    sources: Sequence[Source], instructions: tuple[str, ...]
) -> tuple[FrameTable, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All datasets as one table with tasks numbered by instruction (-1: not listed), and each row's origin."""
    number = {instruction: index for index, instruction in enumerate(instructions)}
    tasks, episodes, first_episode = [], [], 0
    for table, names in sources:
        tasks.append(np.asarray([number.get(name, -1) for name in names], dtype=np.int64)[table.task])
        episodes.append(table.episode + first_episode)
        first_episode += int(table.episode.max(initial=-1)) + 1
    lengths = [len(table) for table, _ in sources]
    joined = FrameTable(
        task=np.concatenate(tasks),
        episode=np.concatenate(episodes),
        position=np.concatenate([table.position for table, _ in sources]),
        length=np.concatenate([table.length for table, _ in sources]),
    )
    frame = np.concatenate([np.arange(length) for length in lengths])
    return joined, np.repeat(np.arange(len(lengths)), lengths), frame
