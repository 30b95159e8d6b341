"""Which frames of a memory are only measured, and how frames are chosen so that some can be.

A frame shows whether a skill was kept only if no frame of its episode is trained on. Frames between trained frames of
the same episode gave a drift of 0.06 where fresh episodes gave 1.6 (docs/decisions/0033).
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.frames import choose_frames, spread
from lerobot_craft.lerobot_api.stored_frames import FrameTable
from lerobot_craft.memory.format import Memory

type Ints = npt.NDArray[np.int64]

# Maximum number of a task's frames kept out of training: 16, and one in five if the episodes allow.
_AT_MOST, _ONE_OF = 16, 5
_FEWEST = 3  # a task with fewer frames keeps none out


def choose_in_task(table: FrameTable, n: int, seed: list[int]) -> Ints:
    """At most n rows of one task, spread over episodes and phases.

    If there are few episodes, one of them provides only held-out frames, and all others are trained on.
    """
    episodes = np.unique(table.episode)
    measured = wanted(n)
    if n >= len(table) or len(episodes) == 1 or n <= measured * len(episodes):
        return choose_frames(table, n, seed)
    rng = np.random.default_rng([*seed, 1])
    apart = table.episode == rng.choice(episodes)
    few, many = np.flatnonzero(apart), np.flatnonzero(~apart)
    few = few[choose_frames(table.take(few), measured, seed)]
    many = many[choose_frames(table.take(many), n - len(few), seed)]
    groups = np.repeat([0, 1], [len(few), len(many)])
    rows: Ints = np.concatenate([few, many])[spread(groups, rng)]
    return rows


def kept_out(memory: Memory) -> Tensor:
    """Which frames are only measured, bool [n]: whole episodes of each task, those with the fewest frames first.

    A fifth of a task's frames, at most 16, but at least one episode. If a task has a single episode, a fifth of its
    frames, spread over it. None if a task has fewer than three frames.
    """
    apart = torch.zeros(len(memory), dtype=torch.bool)
    episodes = episodes_of(memory)
    for task in memory.instructions:
        rows = memory.rows_of(task).numpy()
        if len(rows) >= _FEWEST:
            apart[torch.from_numpy(_measured(rows, episodes[rows]))] = True
    return apart


def wanted(frames: int) -> int:
    """How many of a task's frames should be held out."""
    return min(max(1, round(frames / _ONE_OF)), _AT_MOST)


def episodes_of(memory: Memory) -> Ints:
    """An episode number for each frame [n]; unique across sources."""
    pairs = torch.stack([memory.dense("dataset").long(), memory.dense("episode").long()])  # [2, n]
    numbers: Ints = pairs.unique(dim=1, return_inverse=True)[1].numpy()
    return numbers


def _measured(rows: Ints, episodes: Ints) -> Ints:
    """Rows of one task that are held out."""
    names, sizes = np.unique(episodes, return_counts=True)
    count = wanted(len(rows))
    if len(names) == 1:
        within: Ints = np.linspace(0, len(rows) - 1, count + 2).round().astype(np.int64)[1:-1]
        return rows[within]
    order = np.argsort(sizes, kind="stable")
    # As many whole episodes as fit, at least one, never all.
    fitting = int(np.searchsorted(np.cumsum(sizes[order]), count, side="right"))
    chosen = order[: min(max(1, fitting), len(names) - 1)]
    measured: Ints = rows[np.isin(episodes, names[chosen])]
    return measured
