"""How sure a success rate is: score intervals for pooled episodes, a hierarchical bootstrap for a mean over runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
# Sums of rates such as 0.1 differ from their exact value in the last bits; an interval must not exclude its own mean.
_ROUNDING = 1e-12

Interval = tuple[float, float]
type FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """One measured number, and the scenario, seed and task that it belongs to.

    Scenarios of one `trunk` begin with the same policy, seed by seed.

    Attributes:
        value: The rate, or a difference of rates.
        episodes: What the value is the mean of, one number per start state in order; empty if only the mean is known.
        own_starts: Whether the seed drew start states of its own. If not, all seeds share those of the task.
    """

    scenario: str
    seed: int
    task: str
    value: float
    trunk: str | None = None
    episodes: tuple[int, ...] = ()
    own_starts: bool = False


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of `successes` out of `n` independent episodes (Wilson 1927).

    Unlike the normal approximation it has a width at 0 of n and at n of n, which are common results of a policy.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes of {n} episodes is no rate")
    return _score_interval(successes / n, n, confidence)


def _score_interval(rate: float, n: int, confidence: float) -> Interval:
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At the ends the exact bound is the end itself; rounding would leave 0.9999999.
    return (0.0 if rate == 0 else centre - half, 1.0 if rate == 1 else centre + half)


def newcombe(before: tuple[int, int], after: tuple[int, int], confidence: float = CONFIDENCE) -> Interval:
    """Interval of a difference of two independent rates, `before - after`, each as (successes, n).

    Newcombe 1998, "Interval estimation for the difference between independent proportions", method 10.
    """
    first, second = before[0] / before[1], after[0] / after[1]
    return _square_and_add(first, wilson(*before, confidence), second, wilson(*after, confidence), 0.0)


def newcombe_paired(
    both: float, first_only: float, second_only: float, n: int, confidence: float = CONFIDENCE
) -> Interval:
    """Interval of a difference of two rates, first minus second, that were measured from the same `n` start states.

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired
    data", Statistics in Medicine 17, 2635-2650, method 10: the intervals of both rates by Wilson, combined with their
    correlation phi, which is reduced by a continuity correction.

    Args:
        both: Share of start states from which both sides succeed.
        first_only: Share from which the first side alone succeeds.
        second_only: Share from which the second side alone succeeds.
        n: Start states.
        confidence: Confidence of the interval.
    """
    first, second = (min(max(both + only, 0.0), 1.0) for only in (first_only, second_only))
    neither = 1 - both - first_only - second_only
    product = n * n * (both * neither - first_only * second_only)
    if product > 0:
        product = max(product - n / 2, 0.0)
    margins = first * (1 - first) * second * (1 - second)
    phi = product / (n * n * math.sqrt(margins)) if margins > _ROUNDING else 0.0
    limits = (_score_interval(_exact(rate, round(rate)), n, confidence) for rate in (first, second))
    return _square_and_add(first, next(limits), second, next(limits), min(max(phi, -1.0), 1.0))


def _square_and_add(first: float, of_first: Interval, second: float, of_second: Interval, phi: float) -> Interval:
    """Distances of the bounds from their rates, combined like standard errors of correlation `phi`."""

    def combined(one: float, other: float) -> float:
        return math.sqrt(max(one * one - 2 * phi * one * other + other * other, 0.0))

    difference = first - second
    return (
        difference - combined(first - of_first[0], of_second[1] - second),
        difference + combined(of_first[1] - first, second - of_second[0]),
    )


def envelope(intervals: Iterable[Interval]) -> Interval:
    """The smallest interval that holds all of them."""
    lows, highs = zip(*intervals, strict=True)
    return (min(lows), max(highs))


def has_starts(cells: Sequence[Cell]) -> bool:
    """Whether the result of every start state is known, with as many starts in every cell."""
    return bool(cells) and min(len(cell.episodes) for cell in cells) > 0 and len({len(c.episodes) for c in cells}) == 1


def distinct_starts(cells: Sequence[Cell]) -> int:
    """Different start states behind cells that have episodes.

    A start state belongs to a task, and to a seed if seeds draw their own. Other scenarios and other seeds that are
    measured from it again add no start state.
    """
    return sum({(c.task, c.seed if c.own_starts else None): len(c.episodes) for c in cells}.values())


def paired_cells(first: Sequence[Cell], second: Sequence[Cell]) -> list[Cell]:
    """Differences `first - second`, cell by cell, and start by start if both sides were measured from the same starts.

    Raises:
        ValueError: The two sides have different tasks, seeds or scenarios.
    """
    pairs = list(zip(sorted(first, key=_where), sorted(second, key=_where), strict=True))
    if any(_where(one) != _where(other) for one, other in pairs):
        raise ValueError("a difference of cells that are not of the same task of the same run")
    started = all(len(a.episodes) == len(b.episodes) and a.own_starts == b.own_starts for a, b in pairs)
    return [
        replace(
            a,
            value=a.value - b.value,
            episodes=tuple(x - y for x, y in zip(a.episodes, b.episodes, strict=True)) if started else (),
        )
        for a, b in pairs
    ]


def _where(cell: Cell) -> tuple[str, int, str]:
    return cell.scenario, cell.seed, cell.task


def nested_mean(cells: Sequence[Cell]) -> float:
    """Mean over scenarios of the mean over seeds of the mean over tasks: many tasks give a scenario no more weight."""
    layout = _layout(cells)
    tree: dict[str, dict[int, list[float]]] = {}
    for cell in _in_order(cells, layout):
        tree.setdefault(cell.scenario, {}).setdefault(cell.seed, []).append(cell.value)
    return fmean(fmean(map(fmean, seeds.values())) for seeds in tree.values())


def bootstrap_mean(
    cells: Sequence[Cell], confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile interval of `nested_mean` when scenarios, seeds, tasks and start states are drawn anew.

    - Cells of one run share a checkpoint and cells of one scenario share demonstrations, so they are no independent
      samples. Drawing whole scenarios, seeds within them and tasks within those keeps them together (Davison and
      Hinkley 1997, section 3.8).
    - Start states are drawn within their task if all cells have their episodes. A difference has one number per
      start, so both of its sides are drawn together.
    - Scenarios of one trunk have base policies and old tasks in common, so one draw of seeds and one of tasks holds
      for all of them, and for a seed and a task one draw of start states. Start states that seeds share have one draw
      per task for all seeds and scenarios (crossed factors, each drawn by itself: Owen 2007, the pigeonhole
      bootstrap).

    Episodes also vary between the seeds that are drawn, so that drawing starts as well counts their noise more than
    once: the interval is rather too wide. Few scenarios make it too narrow; one cell without episodes gives a point.
    """
    means = _resampled_means([cells], resamples, seed)[0]
    return _percentiles(means, nested_mean(cells), confidence)


def bootstrap_ratio(
    numerator: Sequence[Cell],
    denominator: Sequence[Cell],
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile interval of the ratio of two nested means of the same cells, drawn together.

    Draws whose denominator is 0 are left out.
    """
    above, below = _resampled_means([numerator, denominator], resamples, seed)
    ratios = above[below > 0] / below[below > 0]
    return _percentiles(ratios, nested_mean(numerator) / nested_mean(denominator), confidence)


def _percentiles(means: FloatArray, centre: float, confidence: float) -> Interval:
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return (_exact(float(low), centre, 0.0, 1.0), _exact(float(high), centre, 0.0, 1.0))


def _exact(bound: float, *points: float) -> float:
    """The bound, or the point that it is but for rounding."""
    return next((point for point in points if abs(bound - point) < _ROUNDING), bound)


class _Layout(NamedTuple):
    """The tree of scenarios, seeds and tasks. Cells are numbered in its order."""

    where: tuple[tuple[str, int, str], ...]  # scenario, seed and task of each cell
    trunks: tuple[str | None, ...]  # of each scenario

    @property
    def tasks(self) -> NDArray[np.int64]:
        """Tasks of each seed [scenarios, seeds]; 0 if a scenario has fewer seeds than another."""
        counts: dict[str, dict[int, int]] = {}
        for scenario, seed, _ in self.where:
            own = counts.setdefault(scenario, {})
            own[seed] = own.get(seed, 0) + 1
        most = max(map(len, counts.values()))
        return np.array([[*own.values(), *[0] * (most - len(own))] for own in counts.values()], dtype=np.int64)


def _layout(cells: Sequence[Cell]) -> _Layout:
    if not cells:
        raise ValueError("a mean over no cells")
    trunks = {cell.scenario: cell.trunk for cell in cells}
    order = {scenario: i for i, scenario in enumerate(trunks)}  # as they came
    # Seeds in one order, whichever scenario of a trunk it is. A results file has its tasks by name: runs that were
    # read must be drawn as those that were written.
    where = sorted(map(_where, cells), key=lambda place: (order[place[0]], *place[1:]))
    for place, following in pairwise(where):
        if place == following:
            raise ValueError(f"{place[0]}, seed {place[1]}, {place[2]}: measured twice")
    return _Layout(tuple(where), tuple(trunks.values()))


def _in_order(cells: Sequence[Cell], layout: _Layout) -> list[Cell]:
    by_place = {_where(cell): cell for cell in cells}
    return [by_place[place] for place in layout.where]


def _resampled_means(tables: Sequence[Sequence[Cell]], resamples: int, seed: int) -> list[FloatArray]:
    """Nested means [resamples] of each table, all of them drawn together."""
    layout = _layout(tables[0])
    if any(_layout(cells) != layout for cells in tables):
        raise ValueError("tables that are drawn together have the same scenarios, seeds and tasks")
    joined = [cell for cells in tables for cell in cells]
    starts = len(joined[0].episodes) if has_starts(joined) else 0
    draw = _draw(layout, starts, all(cell.own_starts for cell in joined), resamples, seed)
    means = []
    for cells in tables:
        ordered = _in_order(cells, layout)
        if starts:
            episodes = np.array([cell.episodes for cell in ordered], dtype=np.int8).ravel()
            # In blocks: indices are widened for the time of their use.
            blocks = np.array_split(draw.picked, max(1, draw.picked.size // 500_000))
            drawn = np.concatenate([episodes[block].sum(axis=2, dtype=np.int64) for block in blocks]) / starts
        else:
            drawn = np.array([cell.value for cell in ordered])[draw.picked]
        means.append((drawn * draw.weights).sum(axis=1))
    return means


class _Draw(NamedTuple):
    """A resample picks cells, or start states of cells, and weighs them.

    Without starts `picked` are numbers of cells [resamples, slots]; with them numbers of start states, counted through
    all cells [resamples, slots, starts]. `weights` are [resamples, slots].
    """

    picked: NDArray[np.unsignedinteger]
    weights: FloatArray


@lru_cache(maxsize=4)  # rows of one table have the same layout
def _draw(layout: _Layout, starts: int, own_starts: bool, resamples: int, seed: int) -> _Draw:
    rng = np.random.default_rng(seed)
    tasks = layout.tasks
    seeds = (tasks > 0).sum(axis=1)
    first = (np.cumsum(tasks) - tasks.ravel()).reshape(tasks.shape)  # number of each seed's first cell
    scenarios, most_seeds, most_tasks = *tasks.shape, int(tasks.max())
    scenario = rng.integers(scenarios, size=(resamples, scenarios, 1, 1))
    seed_draw = rng.random((resamples, scenarios, most_seeds))
    task_draw = rng.random((resamples, scenarios, most_seeds, most_tasks))
    for trunk in sorted(set(layout.trunks) - {None}, key=str):
        shares = np.array([other == trunk for other in layout.trunks])[scenario]  # [resamples, scenarios, 1, 1]
        seed_draw = np.where(shares[..., 0], rng.random((resamples, 1, most_seeds)), seed_draw)
        task_draw = np.where(shares, rng.random((resamples, 1, 1, most_tasks)), task_draw)
    seed_count = seeds[scenario]  # [resamples, scenarios, 1, 1]
    drawn_seed = _below(seed_count[..., 0], seed_draw)[..., None]  # [resamples, scenarios, seeds, 1]
    task_count = tasks[scenario, drawn_seed]
    cell = first[scenario, drawn_seed] + _below(task_count, task_draw)  # [resamples, scenarios, seeds, tasks]
    kept = (np.arange(most_tasks) < task_count) & (np.arange(most_seeds)[:, None] < seed_count)
    weights = (kept / (scenarios * seed_count * task_count)).reshape(resamples, -1)
    if not starts:
        return _Draw(cell.reshape(resamples, -1).astype(np.uint32), weights)
    start = _drawn_starts(rng, layout, scenario, cell, starts, own_starts=own_starts)
    picked = cell[..., None].astype(np.uint32) * np.uint32(starts) + start
    return _Draw(picked.reshape(resamples, -1, starts), weights)


def _drawn_starts(
    rng: np.random.Generator,
    layout: _Layout,
    scenario: NDArray[np.int64],
    cell: NDArray[np.int64],
    starts: int,
    *,
    own_starts: bool,
) -> NDArray[np.uint32]:
    """Start states of the drawn cells [resamples, scenarios, seeds, tasks, starts].

    Args:
        rng: Source of the draws.
        layout: Where the cells are.
        scenario: Drawn scenarios [resamples, scenarios, 1, 1].
        cell: Drawn cells [resamples, scenarios, seeds, tasks].
        starts: Start states of each cell.
        own_starts: Whether seeds drew their own.
    """
    by_slot = rng.integers(starts, size=(*cell.shape, starts), dtype=np.uint32) if own_starts else None
    trunks = sorted(set(layout.trunks) - {None}, key=str)
    if by_slot is not None and not trunks:
        return by_slot
    names = sorted({task for _, _, task in layout.where})
    task = np.array([names.index(task) for _, _, task in layout.where])[cell]
    resamples, _, seeds, _ = cell.shape
    resample = np.arange(resamples)[:, None, None, None]
    if by_slot is None:
        shared: NDArray[np.uint32] = rng.integers(starts, size=(resamples, len(names), starts), dtype=np.uint32)
        return np.asarray(shared[resample, task])
    # One draw for a seed and a task of a trunk, which all of its scenarios are measured from.
    table = rng.integers(starts, size=(resamples, len(trunks), seeds, len(names), starts), dtype=np.uint32)
    numbers = np.array([trunks.index(trunk) if trunk is not None else -1 for trunk in layout.trunks])[scenario]
    in_trunk = table[resample, numbers, np.arange(seeds)[:, None], task]
    return np.where(numbers[..., None] >= 0, in_trunk, by_slot)


def _below(counts: NDArray[np.int64], draw: FloatArray) -> NDArray[np.int64]:
    """Indices below `counts`, which broadcasts to `draw`, numbers in [0, 1)."""
    drawn: NDArray[np.int64] = (draw * counts).astype(np.int64)
    return drawn
