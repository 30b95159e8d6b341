"""How the old tasks came through, from the lines of a run: one rule for the summary, the model card and the report."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A batch holds few anchors of one task: the mean over some visits says more than the last one.
_LAST_VISITS = 10


@dataclass(frozen=True)
class Outcome:
    """How one old task, or all of them together, came through.

    Attributes:
        task: Its instruction; None for all together.
        drift: Mean of its retention loss over the last `visits` anchor steps that measured it, in the budget's unit.
        visits: How many those were.
        first_action_drift: The first drift of the actions that was measured.
        last_action_drift: The last one.
    """

    task: str | None
    drift: float | None = None
    visits: int = 0
    first_action_drift: float | None = None
    last_action_drift: float | None = None

    def is_over(self, epsilon: float | None) -> bool:
        """Whether the drift was measured and is above the budget."""
        return self.drift is not None and epsilon is not None and self.drift > epsilon


class Outcomes:
    """All old tasks together, then each, step by step."""

    def __init__(self, tasks: Sequence[str]) -> None:
        names = [None, *tasks]
        self._drifts: dict[str | None, deque[float]] = {task: deque(maxlen=_LAST_VISITS) for task in names}
        self._first: dict[str | None, float] = {}
        self._last: dict[str | None, float] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """What one step measured, by the keys of docs/metrics.md."""
        for task, drifts in self._drifts.items():
            if (drift := values.get(_key("retention_loss", task))) is not None:
                drifts.append(drift)
            if (action_drift := values.get(_key("action_drift", task))) is not None:
                self._first.setdefault(task, action_drift)
                self._last[task] = action_drift

    def __iter__(self) -> Iterator[Outcome]:
        for task, seen in self._drifts.items():
            drift = sum(seen) / len(seen) if seen else None
            yield Outcome(task, drift, len(seen), self._first.get(task), self._last.get(task))


def outcomes(
    metrics: Iterable[Mapping[str, Any]], tasks: Sequence[str], history: Iterable[Mapping[str, Any]] | None = None
) -> Outcomes:
    """Of lines that were written already.

    Args:
        metrics: Logged steps.
        tasks: Old tasks.
        history: Every anchor step; None where those were not kept, and the logged ones must do.
    """
    found = Outcomes(tasks)
    for values in metrics:
        found.add(values if history is None else named(values, "action_drift"))
    for values in history or ():
        found.add(named(values, "retention_loss"))
    return found


def named(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Of these values, one measure: of all old tasks together and of each."""
    return {key: value for key, value in values.items() if key == name or key.startswith(f"{name}/")}


def _key(name: str, task: str | None) -> str:
    return name if task is None else f"{name}/{task}"
