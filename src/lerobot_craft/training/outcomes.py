"""How the old tasks came through, from the lines of a run: one rule for the summary, the model card and the report."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

type Verdict = Literal["within budget", "near budget", "over budget", "unverified"]
WITHIN: Verdict = "within budget"
NEAR: Verdict = "near budget"  # the interval has the budget inside
OVER: Verdict = "over budget"
UNVERIFIED: Verdict = "unverified"

# A batch holds few anchors of one task: the mean over some visits says more than the last one.
_LAST_VISITS = 10


@dataclass(frozen=True)
class Outcome:
    """How one old task, or all of them together, came through.

    Attributes:
        task: Its instruction; None for all together.
        drift: Mean of its retention loss over the last `visits` anchor steps that measured it, in the budget's unit.
        visits: How many those were.
        action_drift: The last measured drift of the actions, on anchors that no step visits where there are any.
        low: Of its 95 % interval over these anchors.
        high: Likewise.
        verified: Whether these anchors are real old frames. Nothing else is called retention.
    """

    task: str | None
    drift: float | None = None
    visits: int = 0
    action_drift: float | None = None
    low: float | None = None
    high: float | None = None
    verified: bool = False

    def verdict(self, epsilon: float | None) -> Verdict | None:
        """What the run may say of this task; None where there is no budget, or nothing was measured.

        Real frames that are kept out of training decide where there are any. The anchors that are trained on can show
        that a budget was missed, not that it was kept.
        """
        if epsilon is None:
            return None
        if self.verified and self.low is not None and self.high is not None:
            return OVER if self.low > epsilon else WITHIN if self.high <= epsilon else NEAR
        if self.drift is None:
            return None
        return OVER if self.drift > epsilon else UNVERIFIED

    def is_over(self, epsilon: float | None) -> bool:
        """Whether the drift was measured and is above the budget."""
        return self.verdict(epsilon) == OVER


class Outcomes:
    """All old tasks together, then each, step by step."""

    def __init__(self, tasks: Sequence[str]) -> None:
        names = [None, *tasks]
        self._drifts: dict[str | None, deque[float]] = {task: deque(maxlen=_LAST_VISITS) for task in names}
        self._actions: dict[str | None, tuple[float, float | None, float | None]] = {}
        self._verified = False

    def add(self, values: Mapping[str, Any]) -> None:
        """What one step measured, by the keys of docs/metrics.md."""
        for task, drifts in self._drifts.items():
            if (drift := values.get(_key("retention_loss", task))) is not None:
                drifts.append(drift)
            if (action_drift := values.get(_key("action_drift", task))) is not None:
                low, high = (values.get(_key(f"action_drift_{end}", task)) for end in ("low", "high"))
                self._actions[task] = (action_drift, low, high)
                self._verified = bool(values.get("verified", self._verified))

    def __iter__(self) -> Iterator[Outcome]:
        for task, seen in self._drifts.items():
            drift = sum(seen) / len(seen) if seen else None
            action_drift, low, high = self._actions.get(task, (None, None, None))
            yield Outcome(task, drift, len(seen), action_drift, low, high, self._verified)


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
        found.add(values if history is None else of_actions(values))
    for values in history or ():
        found.add(named(values, "retention_loss"))
    return found


def named(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Of these values, one measure: of all old tasks together and of each."""
    return {key: value for key, value in values.items() if key == name or key.startswith(f"{name}/")}


def of_actions(values: Mapping[str, Any]) -> dict[str, Any]:
    """The drift of the actions, its interval, and whether it was measured on real old frames."""
    names = ("action_drift", "action_drift_low", "action_drift_high", "verified")
    return {key: value for name in names for key, value in named(values, name).items()}


def _key(name: str, task: str | None) -> str:
    return name if task is None else f"{name}/{task}"
