"""Which frames become anchors: evenly over tasks, over the episodes of a task and over the phases of an episode.

Old skills are lost where no anchor looks. Uniform sampling over frames would give long tasks and long episodes most of
the anchors, and by chance leave parts of a movement without any.
"""

import numpy as np
import numpy.typing as npt

from lerobot_craft.lerobot_api.stored_frames import FrameTable

type Ints = npt.NDArray[np.int64]


def choose_frames(table: FrameTable, n: int, seed: int | list[int]) -> Ints:
    """Rows of n frames of the table, in an order of which every beginning is spread over tasks and episodes as well.

    Tasks get the same number of frames, give or take one, and so do the episodes of a task; what is too short gives
    its share to the others. The m frames of a task lie in m different strata of relative position.

    Args:
        table: The frames to choose from.
        n: How many; no frame comes twice, so a table with fewer gives all that it has.
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
    """Parts of n that are as equal as the capacities allow; who gets one more is drawn.

    Parts below their capacity differ by at most one, and they sum to n or, if that is less, to all the capacity.
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
    """An order of the items in which every group is spread over the whole length, keeping the order inside a group.

    Args:
        groups: The group of each item, as small integers from 0.
        rng: Orders items that are due at the same place.
    """
    sizes = np.bincount(groups)
    by_group = np.argsort(groups, kind="stable")
    rank = np.empty(len(groups), dtype=np.int64)  # of an item inside its group
    rank[by_group] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    due = (rank + 0.5) / sizes[groups]
    order: Ints = np.lexsort((rng.random(len(groups)), due))
    return order


def _choose_in_task(episode: Ints, rows: Ints, m: int, rng: np.random.Generator) -> Ints:
    """Rows of m frames of one task, episodes by turns; the phases of an episode come in a random order.

    Args:
        episode: Of every frame of the table.
        rows: The task's, sorted by episode and position.
        m: How many, at least one.
        rng: Draws.
    """
    sizes = np.unique(episode[rows], return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes
    quotas = share_out(m, sizes, rng)
    # Slot j of an episode with q slots is due at (j + u) / q of the movement. Sorted over all episodes, slots get
    # strata 0..m-1: each stratum once, and each episode's strata spread over the whole movement.
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
    """Ascending places in [0, size), moved apart as little as needed so that none is taken twice."""
    slot = np.arange(len(places))
    later: Ints = np.maximum.accumulate(places - slot) + slot
    apart: Ints = np.minimum(later, size - len(places) + slot)
    return apart
