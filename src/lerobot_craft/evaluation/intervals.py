"""How sure a success rate is: Wilson's interval for one rate, a hierarchical bootstrap for a mean over runs."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

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
    """One measured number and where it belongs: one task of one seed of one scenario.

    Scenarios of one `trunk` begin with the same policy, seed by seed.
    """

    scenario: str
    seed: int
    task: str
    value: float
    trunk: str | None = None


def wilson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of `successes` out of `n` independent episodes (Wilson 1927).

    Unlike the normal approximation it has a width at 0 of n and at n of n, which is where policies live.
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes of {n} episodes is no rate")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = successes / n
    centre = (rate + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n))
    # At the ends the exact bound is the end itself; rounding would leave 0.9999999.
    return (0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


def newcombe(before: tuple[int, int], after: tuple[int, int], confidence: float = CONFIDENCE) -> Interval:
    """Interval of a difference of rates, `before - after`, each as (successes, n) (Newcombe 1998, method 10)."""
    first, second = before[0] / before[1], after[0] / after[1]
    (low_1, high_1), (low_2, high_2) = wilson(*before, confidence), wilson(*after, confidence)
    difference = first - second
    return (
        difference - math.hypot(first - low_1, high_2 - second),
        difference + math.hypot(high_1 - first, second - low_2),
    )


def envelope(intervals: Iterable[Interval]) -> Interval:
    """The smallest interval that holds all of them."""
    lows, highs = zip(*intervals, strict=True)
    return (min(lows), max(highs))


def nested_mean(cells: Sequence[Cell]) -> float:
    """Mean over scenarios of the mean over seeds of the mean over tasks: many tasks give a scenario no more weight."""
    values, tasks, seeds, _ = _grid(cells)
    per_seed = np.where(tasks > 0, values.sum(axis=2) / np.maximum(tasks, 1), 0.0)  # [scenarios, seeds]
    return float((per_seed.sum(axis=1) / seeds).mean())


def bootstrap_mean(
    cells: Sequence[Cell], confidence: float = CONFIDENCE, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Percentile interval of `nested_mean` when scenarios, seeds within them and tasks within those are drawn anew.

    Cells of one run share a checkpoint and cells of one scenario share demonstrations, so they are no independent
    samples; drawing whole scenarios and whole seeds keeps them together (Davison and Hinkley 1997, section 3.8).
    Scenarios of one trunk have base policies and old tasks in common, so one draw of seeds and one of tasks holds for
    all of them (crossed factors, each drawn by itself: Owen 2007, the pigeonhole bootstrap).
    Few scenarios give intervals that are somewhat too narrow; one cell gives a point.
    """
    rng = np.random.default_rng(seed)
    values, tasks, seeds, trunks = _grid(cells)
    scenarios, most_seeds, most_tasks = values.shape
    scenario = rng.integers(scenarios, size=(resamples, scenarios, 1, 1))
    seed_draw = rng.random((resamples, scenarios, most_seeds))
    task_draw = rng.random((resamples, scenarios, most_seeds, most_tasks))
    for trunk in sorted(set(trunks) - {None}, key=str):
        shares = np.array([other == trunk for other in trunks])[scenario]  # [resamples, scenarios, 1, 1]
        seed_draw = np.where(shares[..., 0], rng.random((resamples, 1, most_seeds)), seed_draw)
        task_draw = np.where(shares, rng.random((resamples, 1, 1, most_tasks)), task_draw)
    drawn_seed = _below(seeds[scenario[..., 0]], seed_draw)[..., None]  # [resamples, scenarios, seeds, 1]
    task_count = tasks[scenario, drawn_seed]  # [resamples, scenarios, seeds, 1]
    drawn_task = _below(task_count, task_draw)
    kept = np.arange(most_tasks) < task_count
    sums = np.where(kept, values[scenario, drawn_seed, drawn_task], 0.0).sum(axis=3)
    per_seed = sums / np.maximum(task_count[..., 0], 1)  # [resamples, scenarios, seeds]
    seed_count = seeds[scenario[..., 0]]
    kept_seeds = np.arange(most_seeds) < seed_count
    means = (np.where(kept_seeds, per_seed, 0.0).sum(axis=2) / seed_count[..., 0]).mean(axis=1)  # [resamples]
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    centre = nested_mean(cells)
    return (_exact(float(low), centre), _exact(float(high), centre))


def _exact(bound: float, centre: float) -> float:
    return centre if abs(bound - centre) < _ROUNDING else bound


def _below(counts: NDArray[np.int64], draw: FloatArray) -> NDArray[np.int64]:
    """Indices below `counts`, which broadcasts to `draw`, numbers in [0, 1)."""
    drawn: NDArray[np.int64] = (draw * counts).astype(np.int64)
    return drawn


def _grid(cells: Sequence[Cell]) -> tuple[FloatArray, NDArray[np.int64], NDArray[np.int64], list[str | None]]:
    """Values padded with zeros [scenarios, seeds, tasks], tasks per seed [scenarios, seeds], seeds and trunks."""
    if not cells:
        raise ValueError("a mean over no cells")
    tree: dict[str, dict[int, dict[str, float]]] = {}
    trunks = {cell.scenario: cell.trunk for cell in cells}
    for cell in cells:
        tasks = tree.setdefault(cell.scenario, {}).setdefault(cell.seed, {})
        if cell.task in tasks:
            raise ValueError(f"{cell.scenario}, seed {cell.seed}, {cell.task}: measured twice")
        tasks[cell.task] = cell.value
    most_seeds = max(map(len, tree.values()))
    most_tasks = max(len(tasks) for seeds in tree.values() for tasks in seeds.values())
    values = np.zeros((len(tree), most_seeds, most_tasks))
    counts = np.zeros((len(tree), most_seeds), dtype=np.int64)
    for i, seeds in enumerate(tree.values()):
        for j, (_, tasks) in enumerate(sorted(seeds.items())):  # in one order, whichever scenario of a trunk it is
            counts[i, j] = len(tasks)
            # A results file has its tasks by name: runs that were read must be drawn as those that were written.
            values[i, j, : len(tasks)] = [tasks[name] for name in sorted(tasks)]
    seed_counts = np.array([len(seeds) for seeds in tree.values()], dtype=np.int64)
    return values, counts, seed_counts, [trunks[scenario] for scenario in tree]
