"""Multipliers that enforce the budget, and the budget schedule. docs/method.md, equations (17) to (21).

Multipliers are Python floats, equal on all ranks. Their state is JSON, and no rule can make them NaN or infinite.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lerobot_craft.errors import CraftError

DualRule = Literal["ascent", "pi", "log", "ratio"]
EpsilonDecay = Literal["linear", "cosine", "exponential"]

_MULTIPLYING = ("log", "ratio")

# Larger violations are clipped to this, so that no sum or product overflows. Any reasonable clip binds earlier.
_LARGEST_VIOLATION = 1e30
# Largest change of log(multiplier) per measurement, as a multiple of lambda_lr (19a).
_LARGEST_LOG_RATIO = 1.0


def update_lambda(lambda_: float, retention_loss: float, epsilon: float, lambda_lr: float, lambda_max: float) -> float:
    """The rule of the original notes: clip(lambda + lambda_lr (L_ret - eps), 0, lambda_max), equation (17).

    All arguments are scalars. Returns the next multiplier.
    """
    dual = Dual(initial_lambda=lambda_, lambda_lr=lambda_lr, lambda_max=lambda_max)
    return Multipliers(dual).update([retention_loss - epsilon])[0]


def epsilon_schedule(
    step: int,
    total_steps: int,
    epsilon_start: float,
    epsilon_end: float,
    epsilon_decay_steps: int = 0,
    decay: EpsilonDecay = "linear",
) -> float:
    """Budget at `step` (counted from 0), equation (21). `epsilon_decay_steps` = 0 means all training steps."""
    if decay not in get_args(EpsilonDecay):
        raise ValueError(f"epsilon decay must be one of {', '.join(get_args(EpsilonDecay))}; got {decay!r}")
    if not (0 <= epsilon_start < math.inf and 0 <= epsilon_end < math.inf):
        raise ValueError(f"a budget is finite and not negative; got epsilon {epsilon_start} -> {epsilon_end}")
    if epsilon_decay_steps < 0:
        raise ValueError(f"epsilon_decay_steps must be 0 (all training steps) or more; got {epsilon_decay_steps}")
    if decay == "exponential" and not (epsilon_start > 0 and epsilon_end > 0):
        raise ValueError(
            f"exponential decay needs a positive start and end; got epsilon {epsilon_start} -> {epsilon_end}"
        )
    progress = min(1.0, max(0, step) / max(1, epsilon_decay_steps or total_steps))
    match decay:
        case "linear":
            share = progress
        case "cosine":
            share = (1 - math.cos(math.pi * progress)) / 2
        case "exponential":
            return math.exp((1 - progress) * math.log(epsilon_start) + progress * math.log(epsilon_end))
    return (1 - share) * epsilon_start + share * epsilon_end


@dataclass(frozen=True)
class Dual:
    """How multipliers move. Defaults follow the specification.

    Attributes:
        rule: `ascent` (17), `pi` (nuPI, 18), `log` (ascent on log lambda, 19) or `ratio` (ascent on log lambda by
            log(L_ret / eps), 19a: one gain fits every budget).
        initial_lambda: Start value of every multiplier.
        lambda_lr: Step per unit of violation (the integral gain of `pi`).
        lambda_min: Floor; > 0 for `log` and `ratio`. At 0, a skill can be lost before its violation is measured.
        lambda_max: Ceiling.
        fall_rate: In [0, 1]: how fast multipliers fall relative to how fast they rise (20). 1 is symmetric.
        proportional_gain: For `pi`, relative to lambda_lr.
        smoothing: nu of `pi`, in [0, 1): weight of the old value in the moving average of the violation.
    """

    rule: DualRule = "ascent"
    initial_lambda: float = 1.0
    lambda_lr: float = 0.01
    lambda_min: float = 0.0
    lambda_max: float = 10.0
    fall_rate: float = 1.0
    proportional_gain: float = 1.0
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.rule not in get_args(DualRule):
            raise ValueError(f"dual rule must be one of {', '.join(get_args(DualRule))}; got {self.rule!r}")
        if not 0 <= self.lambda_min <= self.lambda_max < math.inf:
            raise ValueError(
                f"0 <= lambda_min <= lambda_max < infinity must hold; got {self.lambda_min} and {self.lambda_max}"
            )
        if not self.lambda_min <= self.initial_lambda <= self.lambda_max:
            raise ValueError(
                f"initial_lambda must lie in [{self.lambda_min}, {self.lambda_max}]; got {self.initial_lambda}"
            )
        if not 0 <= self.lambda_lr < math.inf:
            raise ValueError(f"lambda_lr must be finite and not negative; got {self.lambda_lr}")
        if not 0 <= self.fall_rate <= 1:
            raise ValueError(f"lambda_fall_rate must lie in [0, 1]; got {self.fall_rate}")
        if not 0 <= self.proportional_gain < math.inf:
            raise ValueError(f"lambda_gain must be finite and not negative; got {self.proportional_gain}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"lambda_smoothing must lie in [0, 1); got {self.smoothing}")
        if self.rule in _MULTIPLYING and not self.lambda_min > 0:
            raise ValueError(f"the {self.rule} rule multiplies, so 0 would hold it forever: set lambda_min > 0")


class Multipliers:
    """One multiplier per constraint group (an old task, an instruction), moved by its own violation.

    Args:
        dual: The rule and its bounds.
        groups: One name per constraint, in the order of the violations. Default: one group, "all".
    """

    def __init__(self, dual: Dual, groups: Sequence[str] = ("all",)) -> None:
        if not groups or len(set(groups)) != len(groups):
            raise ValueError(f"constraint groups need distinct names, at least one; got {list(groups)}")
        self.dual = dual
        self.groups = tuple(groups)
        self.values = [dual.initial_lambda] * len(groups)
        # xi of (18). `ratio` starts at the lowest ratio that it counts, because the student starts as its teacher.
        self._smoothed = [-_LARGEST_LOG_RATIO if dual.rule == "ratio" else 0.0] * len(groups)

    def follow(self, drifts: Sequence[float | None], epsilon: float, elapsed_steps: int = 1) -> list[float]:
        """Move each multiplier by its drift against the budget; None means no measurement. Return the new values."""
        violations = [None if drift is None else self._violation(drift, epsilon) for drift in drifts]
        return self.update(violations, elapsed_steps)

    def _violation(self, drift: float, epsilon: float) -> float:
        if self.dual.rule != "ratio" or not math.isfinite(drift):
            return drift - epsilon
        if not (drift > 0 and epsilon > 0):
            return _LARGEST_LOG_RATIO if drift > epsilon else -_LARGEST_LOG_RATIO
        return max(-_LARGEST_LOG_RATIO, min(_LARGEST_LOG_RATIO, math.log(drift / epsilon)))

    def update(self, violations: Sequence[float | None], elapsed_steps: int = 1) -> list[float]:
        """Move each multiplier by its violation L_ret - eps; return the new values.

        A violation that is None (no anchor of that group in the batch) or not finite leaves its multiplier unchanged.
        `elapsed_steps` is the K of K-step retention (22): one measurement counts for K steps.
        """
        for i, violation in enumerate(self._checked(violations)):
            if violation is not None and math.isfinite(violation):
                self.values[i] = self._moved(i, violation, elapsed_steps)
        return list(self.values)

    def _moved(self, i: int, violation: float, elapsed_steps: int) -> float:
        dual = self.dual
        violation = max(-_LARGEST_VIOLATION, min(_LARGEST_VIOLATION, violation))
        change = violation * elapsed_steps
        if dual.rule in ("pi", "ratio"):
            before = self._smoothed[i]
            self._smoothed[i] = dual.smoothing * before + (1 - dual.smoothing) * violation
            # Differences telescope, so unlike the integral part they need no factor for skipped steps.
            change += dual.proportional_gain * (self._smoothed[i] - before)
        change *= dual.lambda_lr * (dual.fall_rate if change < 0 else 1.0)
        if dual.rule in _MULTIPLYING:
            low, high = math.log(dual.lambda_min), math.log(dual.lambda_max)
            # Clipped before exp, so that it cannot overflow, and after, because exp(log(10)) is above 10.
            return self._clip(math.exp(max(low, min(high, math.log(self.values[i]) + change))))
        return self._clip(self.values[i] + change)

    def _clip(self, value: float) -> float:
        return max(self.dual.lambda_min, min(self.dual.lambda_max, value))

    def _checked(self, violations: Sequence[float | None]) -> Sequence[float | None]:
        if len(violations) != len(self.groups):
            raise ValueError(f"{len(self.groups)} violations are needed, one per group; got {len(violations)}")
        return violations

    def state_dict(self) -> dict[str, Any]:
        """The changing state as JSON values; floats survive the round trip exactly."""
        return {
            "rule": self.dual.rule,
            "groups": list(self.groups),
            "values": list(self.values),
            "smoothed": list(self._smoothed),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a `state_dict`, clipped to this run's bounds. Another rule or other groups are refused."""
        absent = {"rule", "groups", "values", "smoothed"} - set(state)
        if absent:
            raise CraftError(f"the saved multipliers lack {', '.join(sorted(absent))}: resume from another checkpoint")
        for name, own in (("rule", self.dual.rule), ("groups", list(self.groups))):
            if state[name] != own:
                raise CraftError(
                    f"the saved multipliers have {name} {state[name]!r}, this run has {own!r}: resume with the "
                    "settings of the saved run, or start a new one"
                )
        for values in (state["values"], state["smoothed"]):
            if not all(v is not None and math.isfinite(v) for v in self._checked(values)):
                raise CraftError("the saved multipliers are not finite: resume from an earlier checkpoint")
        self.values = [self._clip(float(v)) for v in state["values"]]
        self._smoothed = [float(v) for v in state["smoothed"]]
