"""Which drift foretells forgetting: rank correlations of drift from the teacher with lost success."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lerobot_craft.evaluation.intervals import CONFIDENCE, FloatArray
from lerobot_craft.evaluation.results import Correlation, Correlations, Run, policy_name

_FEWEST_PAIRS = 4  # three points are ordered by chance in one case of three
_FEWEST_GROUPS = 3
_RESAMPLES = 2000

Kind = Literal["action", "hidden"]


@dataclass(frozen=True)
class Pair:
    """Drift and what was lost, of one run or one of its tasks."""

    run: Run
    drift: float
    lost: float


def correlate(runs: Iterable[Run]) -> dict[str, Correlations]:
    """Correlations of the runs that learnt one task, by policy: drifts of different policies have no common unit."""
    policies: dict[str, list[Run]] = {}
    for run in runs:
        if run.stages is None:
            policies.setdefault(policy_name(run.policy, run.view), []).append(run)
    return {
        policy: Correlations(
            action_per_run=spearman_of(pairs_per_run(own, "action")),
            hidden_per_run=spearman_of(pairs_per_run(own, "hidden")),
            action_per_task=spearman_of(pairs_per_task(own, "action")),
            hidden_per_task=spearman_of(pairs_per_task(own, "hidden")),
        )
        for policy, own in policies.items()
    }


def pairs_per_run(runs: Iterable[Run], kind: Kind) -> list[Pair]:
    """Drift of each run against its loss of mean success on old tasks."""
    pairs = []
    for run in runs:
        drift = run.drift.action if kind == "action" else run.drift.hidden
        if drift is not None:
            lost = [run.base[task] - run.after[task] for task in run.old_tasks]
            pairs.append(Pair(run, drift, sum(lost) / len(lost)))
    return pairs


def pairs_per_task(runs: Iterable[Run], kind: Kind) -> list[Pair]:
    """Drift on each old task against the loss of that task."""
    pairs = []
    for run in runs:
        drifts = run.drift.action_by_task if kind == "action" else run.drift.hidden_by_task
        pairs += [Pair(run, drifts[t], run.base[t] - run.after[t]) for t in run.old_tasks if t in drifts]
    return pairs


def spearman_of(pairs: Sequence[Pair], seed: int = 0) -> Correlation | None:
    """Spearman's rho with a bootstrap that draws whole groups of runs that share their base policy."""
    drift = np.array([pair.drift for pair in pairs])
    lost = np.array([pair.lost for pair in pairs])
    if len(pairs) < _FEWEST_PAIRS or np.ptp(drift) == 0 or np.ptp(lost) == 0:
        return None
    rho = float(spearman(drift, lost, np.ones((1, len(pairs))))[0])
    keys = [(pair.run.trunk or pair.run.scenario, pair.run.seed) for pair in pairs]
    groups = list(dict.fromkeys(keys))
    if len(groups) < _FEWEST_GROUPS:
        return Correlation(rho, None, None, len(pairs))
    drawn = np.random.default_rng(seed).multinomial(
        len(groups), np.full(len(groups), 1 / len(groups)), size=_RESAMPLES
    )  # [resamples, groups]
    rhos = spearman(drift, lost, drawn[:, [groups.index(key) for key in keys]].astype(np.float64))
    tail = (1 - CONFIDENCE) / 2
    # A draw without spread has no rank correlation and says nothing.
    low, high = np.nanquantile(rhos, [tail, 1 - tail])
    return Correlation(rho, float(low), float(high), len(pairs))


def spearman(first: FloatArray, second: FloatArray, times: FloatArray) -> FloatArray:
    """Correlation of average ranks [resamples] where pair i is there `times[:, i]` times; NaN without spread.

    Args:
        first: One side [pairs].
        second: The other side [pairs].
        times: How often each pair is there [resamples, pairs].
    """
    ranks = [_ranks(side, times) for side in (first, second)]
    total = times.sum(axis=1, keepdims=True)
    one, other = (rank - (times * rank).sum(axis=1, keepdims=True) / total for rank in ranks)
    spread = (times * one**2).sum(axis=1) * (times * other**2).sum(axis=1)
    together = (times * one * other).sum(axis=1)
    correlation: FloatArray = np.divide(together, np.sqrt(spread), out=np.full(len(times), np.nan), where=spread > 0)
    return correlation


def _ranks(values: FloatArray, times: FloatArray) -> FloatArray:
    """Rank of every value [resamples, pairs] among `times` copies of each; equal values share their mean rank."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    starts = np.cumsum(sizes) - sizes
    copies = np.add.reduceat(times[:, np.argsort(group, kind="stable")], starts, axis=1)  # [resamples, distinct values]
    ranks: FloatArray = (np.cumsum(copies, axis=1) - (copies - 1) / 2)[:, group]
    return ranks
