"""Scores of a sequence of tasks: NBT, FWT and AUC as LIBERO (Liu et al. 2023, arXiv 2306.03310) defines them.

With c[s, t] the success on task t after stage s, and task k learnt in stage k of K:

    NBT_k = mean over s = k+1..K of (c[k, k] - c[s, k])        how much of a skill is lost later; lower is better
    FWT_k = mean over checkpoints within stage k of success on k   how well and how soon it is learnt
    AUC_k = (FWT_k + sum over s = k+1..K of c[s, k]) / (K - k + 1)     both at once

and each score is the mean over tasks. Three conventions are ours, and the report names them:

- Stages are measured at their end only, so FWT_k = c[k, k].
- NBT_K is 0/0. The last task is left out of the mean: a zero for it would make every loss look smaller.
- A policy that comes with skills has base tasks, learnt in stage 0. "All tasks" counts them; "new tasks" is LIBERO's
  own reading, which hides the loss of what was there before.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SuccessMatrix:
    """Success on every task after every stage.

    Attributes:
        after: `after[s][task]` is the success rate after stage s; stage 0 is the policy before the sequence.
        learnt: Task of each stage from 1 on, in order.
        n_episodes: Episodes behind each rate.
    """

    after: Sequence[Mapping[str, float]]
    learnt: Sequence[str]
    n_episodes: int

    def __post_init__(self) -> None:
        if len(self.after) != len(self.learnt) + 1:
            raise ValueError(f"{len(self.learnt)} stages need {len(self.learnt) + 1} rows, got {len(self.after)}")
        if len(set(self.learnt)) != len(self.learnt):
            raise ValueError("a task is learnt in two stages")

    @property
    def base_tasks(self) -> tuple[str, ...]:
        """Tasks that the policy came with."""
        return tuple(task for task in self.after[0] if task not in self.learnt)

    @property
    def new_tasks(self) -> tuple[str, ...]:
        """Tasks learnt on the way, in order."""
        return tuple(self.learnt)

    @property
    def all_tasks(self) -> tuple[str, ...]:
        """Base tasks, then new ones."""
        return self.base_tasks + self.new_tasks

    def history(self, task: str) -> list[float]:
        """c[k, k], c[k+1, k], ..., c[K, k] of the task learnt in stage k."""
        start = self.learnt.index(task) + 1 if task in self.learnt else 0
        return [row[task] for row in self.after[start:]]

    def variance(self, rate: float) -> float:
        """Variance of a measured rate, with two successes and two failures added (Agresti and Coull 1998).

        Without them a rate of 1.0 from twenty episodes would count as certain.
        """
        adjusted = (rate * self.n_episodes + 2) / (self.n_episodes + 4)
        return adjusted * (1 - adjusted) / (self.n_episodes + 4)


@dataclass(frozen=True)
class Score:
    """A score of one sequence, and the standard error that it has from finite episodes alone."""

    value: float
    error: float


def nbt(matrix: SuccessMatrix, tasks: Iterable[str]) -> Score | None:
    """Negative backward transfer; None if no task has a later stage in which it could be lost."""
    return _score(matrix, tasks, lambda stages: [1.0] + [-1 / (stages - 1)] * (stages - 1) if stages > 1 else None)


def fwt(matrix: SuccessMatrix, tasks: Iterable[str]) -> Score | None:
    """Forward transfer from one checkpoint per stage: success on each task right after it was learnt."""
    return _score(matrix, tasks, lambda stages: [1.0] + [0.0] * (stages - 1))


def auc(matrix: SuccessMatrix, tasks: Iterable[str]) -> Score | None:
    """Area under the success curve: mean success on each task from its own stage to the last."""
    return _score(matrix, tasks, lambda stages: [1 / stages] * stages)


def _score(matrix: SuccessMatrix, tasks: Iterable[str], weights: Callable[[int], list[float] | None]) -> Score | None:
    """Mean over tasks of a weighted sum of each task's history; tasks without weights are left out."""
    values, variances = [], []
    for task in tasks:
        history = matrix.history(task)
        weighting = weights(len(history))
        if weighting is not None:
            values.append(sum(w * rate for w, rate in zip(weighting, history, strict=True)))
            variances.append(sum(w * w * matrix.variance(rate) for w, rate in zip(weighting, history, strict=True)))
    if not values:
        return None
    return Score(sum(values) / len(values), math.sqrt(sum(variances)) / len(values))
