"""Which frames become anchors: evenly over tasks, each task's episodes, and each episode's phases.

Old skills are lost where no anchor looks. Uniform sampling would favor long tasks and episodes, and could miss phases.
"""

import numpy as np
import numpy.typing as npt

from lerobot_craft.lerobot_api.stored_frames import FrameTable

type Ints = npt.NDArray[np.int64]


def choose_frames(table: FrameTable, n: int, seed: int | list[int]) -> Ints:
    """Choose n rows of the table. Every prefix of the result is also spread over tasks and episodes.

    Tasks get equal numbers of frames (within one), as do the episodes of a task; the share of one that is too short
    goes to the others. The m frames of a task lie in m different strata of relative position.

    Args:
        table: The frames to choose from.
        n: Number of frames; all frames if the table has fewer.
        seed: The same seed gives the same frames.
    """
    rng = np.random.default_rng(seed)
    rows = np.lexsort((table.position, table.episode, table.task))
    sizes = np.unique(table.task, return_counts=True)[1]
    quotas = share_out(n, sizes, rng)
    parts = [
        _choose_in_task(table.episode, own, int(quota), rng)
        for own, quota in zip(np.split(rows, np.cumsum(sizes)), [*quotas, 0], strict=True)
        if quota
    ]
    if not parts:
        return np.empty(0, dtype=np.int64)
    return np.concatenate(parts)[spread(np.repeat(np.arange(len(sizes)), quotas), rng)]


def share_out(n: int, capacities: Ints, rng: np.random.Generator) -> Ints:
    """Split n as equally as the capacities allow; who gets one more is random.

    Parts below their capacity differ by at most one. They sum to n, or to the total capacity if that is less.
    """
    parts = np.zeros(len(capacities), dtype=np.int64)
    left = min(n, int(capacities.sum()))
    while left > 0:
        open_ = np.flatnonzero(parts < capacities)
        if left < len(open_):
            parts[rng.permutation(open_)[:left]] += 1
            break
        step = min(left // len(open_), int((capacities - parts)[open_].min()))
        parts[open_] += step
        left -= step * len(open_)
    return parts


def spread(groups: Ints, rng: np.random.Generator) -> Ints:
    """An order of the items that spreads every group over the whole length, keeping the order within a group.

    Args:
        groups: The group of each item, as small integers from 0.
        rng: Breaks ties.
    """
    sizes = np.bincount(groups)
    by_group = np.argsort(groups, kind="stable")
    rank = np.empty(len(groups), dtype=np.int64)  # of an item within its group
    rank[by_group] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    due = (rank + 0.5) / sizes[groups]
    order: Ints = np.lexsort((rng.random(len(groups)), due))
    return order


def _choose_in_task(episode: Ints, rows: Ints, m: int, rng: np.random.Generator) -> Ints:
    """Rows of m frames of one task, alternating between episodes; an episode's phases come in random order.

    Args:
        episode: Of every frame of the table.
        rows: The task's rows, sorted by episode and position.
        m: Number of frames, at least one.
        rng: Random generator.
    """
    sizes = np.unique(episode[rows], return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes
    quotas = share_out(m, sizes, rng)
    # Slot j of an episode with q slots is at (j + u) / q of the movement. Sorting the slots of all episodes gives
    # strata 0..m-1: each is used once, and each episode's strata are spread over the whole movement.
    episode_of = np.repeat(np.arange(len(sizes)), quotas)  # [m]
    slot = np.arange(m) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    due = (slot + rng.random(len(sizes))[episode_of]) / quotas[episode_of]
    stratum = np.empty(m, dtype=np.int64)
    stratum[np.lexsort((rng.random(m), due))] = np.arange(m)
    phase = (stratum + rng.random(m)) / m  # [m], in [0, 1)

    places = np.floor(phase * sizes[episode_of]).astype(np.int64)
    for slots in np.split(np.arange(m), np.cumsum(quotas)):
        if len(slots):
            places[slots] = rng.permutation(_distinct(places[slots], int(sizes[episode_of[slots[0]]])))
    chosen: Ints = rows[starts[episode_of] + places]
    return chosen[spread(episode_of, rng)]


def _distinct(places: Ints, size: int) -> Ints:
    """Ascending places in [0, size), moved apart as little as possible so that all are distinct."""
    slot = np.arange(len(places))
    later: Ints = np.maximum.accumulate(places - slot) + slot
    apart: Ints = np.minimum(later, size - len(places) + slot)
    return apart
