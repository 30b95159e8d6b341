"""Gradient surgery: docs/method.md, equations (11) to (16).

Projecting the task gradient t and merging it with the retention gradient r always gives `a*t + b*r`, where a and b
follow from three inner products. One pass reads both gradients, one writes in place. The only extra memory is r itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lerobot_craft.core.gradients import Gradients, combine_, inner_products, inner_products_by_part
from lerobot_craft.core.precision import rounding_of
from lerobot_craft.errors import CraftError

ProjectionMode = Literal["weighted", "equal", "task_priority"]


class NonFiniteGradientError(CraftError, ArithmeticError):
    """A gradient is not finite. The step that raised this changed nothing."""

    def __init__(self, which: Literal["task", "retention"]) -> None:
        self.which = which
        super().__init__(
            f"the {which} gradient is not finite (NaN, infinity, or a squared length above 1e308), so this step was "
            "not taken; the weights and multipliers are those of the step before. Look at the batch of this step; "
            "lower the learning rate or raise the precision."
        )


@dataclass(frozen=True)
class Surgery:
    """How the two gradients are merged. Defaults follow the specification, without bounds.

    Attributes:
        use_grad_projection: Remove the component of the task gradient that points against the retention gradient.
        conflict_threshold: The gradients conflict if their cosine is below this; in [-1, 0].
        projection_mode: `weighted` t + lambda r; `equal` (t + r) / 2; `task_priority` t + min(lambda, 1) r.
        task_max_norm: Bound on |t| before merging.
        retention_max_norm: Bound on the weighted retention term. Without it, a large lambda starves the task when
            clipped.
        merged_max_norm: Bound on the merged gradient (like `clip_grad_norm_`, without another pass).
    """

    use_grad_projection: bool = True
    conflict_threshold: float = -0.1
    projection_mode: ProjectionMode = "weighted"
    task_max_norm: float = math.inf
    retention_max_norm: float = math.inf
    merged_max_norm: float = math.inf

    def __post_init__(self) -> None:
        if not -1 <= self.conflict_threshold <= 0:
            raise ValueError(f"conflict_threshold is a cosine and must lie in [-1, 0]; got {self.conflict_threshold}")
        if self.projection_mode not in get_args(ProjectionMode):
            raise ValueError(
                f"projection_mode must be one of {', '.join(get_args(ProjectionMode))}; got {self.projection_mode!r}"
            )
        for name in ("task_max_norm", "retention_max_norm", "merged_max_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive (infinity for no bound); got {getattr(self, name)}")

    @property
    def is_sum(self) -> bool:
        """Whether the merged gradient is exactly t + lambda r, so that t and r need not be held separately."""
        unbounded = self.task_max_norm == self.retention_max_norm == math.inf
        return not self.use_grad_projection and self.projection_mode == "weighted" and unbounded


@dataclass(frozen=True)
class Gram:
    """The three inner products of the task gradient t and the retention gradient r, equation (11).

    `rounding` is the length of r relative to t that rounding alone can cause. The default only prevents overflow.
    """

    tt: float
    tr: float
    rr: float
    rounding: float = 1e-30

    @classmethod
    def of(cls, task: Gradients, retention: Gradients, group: dist.ProcessGroup | None = None) -> "Gram":
        """Measure two gradient lists, over all ranks of the group."""
        return cls(*inner_products(task, retention, group))

    @classmethod
    def by_part(
        cls,
        task: Gradients,
        retention: Gradients,
        parts: Sequence[int],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> "tuple[Gram, list[Gram]]":
        """The same, plus one Gram per part of the parameters (see `inner_products_by_part`).

        `dtype` is the precision in which the gradients were computed.
        """
        whole, *of_parts = inner_products_by_part(task, retention, parts, group)
        rounding = rounding_of(dtype)
        return cls(*whole, rounding), [cls(*products, rounding) for products in of_parts]

    @property
    def task_norm(self) -> float:
        """|t|."""
        return math.sqrt(self.tt)

    @property
    def retention_norm(self) -> float:
        """|r|."""
        return math.sqrt(self.rr)

    @property
    def has_direction(self) -> bool:
        """Whether both gradients are long enough for their angle to mean anything.

        While student equals teacher, r is 0 or rounding noise, and projecting along noise would shorten t.
        """
        return self.tt > 0 and self.rr > self.tt * self.rounding**2

    @property
    def cos(self) -> float:
        """Cosine of the angle between t and r; 0 if one of them is zero or r is only rounding noise."""
        if not self.has_direction:
            return 0.0
        return max(-1.0, min(1.0, self.tr / (self.task_norm * self.retention_norm)))

    def require_finite(self) -> None:
        """Raise `NonFiniteGradientError` for the gradient that is not finite."""
        if not math.isfinite(self.tt):
            raise NonFiniteGradientError("task")
        if not math.isfinite(self.rr):
            raise NonFiniteGradientError("retention")


class MergeWeights(NamedTuple):
    """The update is `task * t + retention * r`."""

    task: float
    retention: float
    conflict: bool  # the gradients conflicted and t was projected
    bounded: bool  # lambda r was cut to its bound: a larger lambda has no further effect
    norm: float  # length of the merged gradient


def merge_weights(gram: Gram, lambda_: float, surgery: Surgery, retention_gain: float = 1.0) -> MergeWeights:
    """Weights of the two gradients, equations (12) to (16).

    `retention_gain` is the K of K-step retention: a gradient taken every K-th step counts K times (22).
    """
    gram.require_finite()
    task, retention = _mode_weights(surgery.projection_mode, lambda_)  # (12)
    task *= _shrink(gram.task_norm, surgery.task_max_norm)  # (13)
    retention *= retention_gain
    within = _shrink(retention * gram.retention_norm, surgery.retention_max_norm)  # (14)
    retention *= within
    conflict = surgery.use_grad_projection and gram.cos < surgery.conflict_threshold
    if conflict:
        retention -= task * gram.tr / gram.rr  # (15)
    norm = math.sqrt(max(0.0, task**2 * gram.tt + 2 * task * retention * gram.tr + retention**2 * gram.rr))
    shrink = _shrink(norm, surgery.merged_max_norm)  # (16)
    return MergeWeights(task * shrink, retention * shrink, conflict, within < 1, norm * shrink)


def compute_dot(task: Gradients, retention: Gradients, group: dist.ProcessGroup | None = None) -> float:
    """<t, r> over all parameters and ranks.

    Args:
        task: t, one gradient per parameter [shape of the parameter], or None if it has none.
        retention: r, in the same order and shapes.
        group: The ranks that share the model; default: the default group if torch.distributed is initialized.
    """
    return Gram.of(task, retention, group).tr


def project_if_conflict(
    task: Gradients,
    retention: Gradients,
    conflict_threshold: float = -0.1,
    group: dist.ProcessGroup | None = None,
) -> tuple[list[Tensor | None], bool]:
    """Remove from t, in place, its component along r if cos(t, r) < conflict_threshold.

    Args:
        task: t, one gradient per parameter [shape of the parameter], or None if it has none.
        retention: r, in the same order and shapes; not changed.
        conflict_threshold: A cosine.
        group: The ranks that share the model; default: the default group if torch.distributed is initialized.

    Returns:
        The task gradient, one per parameter [shape of the parameter], and whether there was a conflict.
    """
    surgery = Surgery(conflict_threshold=conflict_threshold)
    weights = merge_weights(Gram.of(task, retention, group), 0.0, surgery)
    if not weights.conflict:
        return list(task), False
    # Where t is None the projection is not, and the caller still owns r: do not write into it.
    room = [torch.zeros_like(r) if t is None and r is not None else t for t, r in zip(task, retention, strict=True)]
    return combine_(room, retention, weights.task, weights.retention), True


def merge_grads(
    task: Gradients, retention: Gradients, lambda_: float, projection_mode: ProjectionMode = "weighted"
) -> list[Tensor | None]:
    """Merge without projection, in place into t (into r where t is None): equation (12).

    Args:
        task: t, one gradient per parameter [shape of the parameter], or None if it has none.
        retention: r, in the same order and shapes.
        lambda_: The multiplier.
        projection_mode: `weighted`: t + lambda r; `equal`: (t + r) / 2; `task_priority`: t + min(lambda, 1) r.

    Returns:
        One gradient per parameter [shape of the parameter]; None where both are None.
    """
    return combine_(task, retention, *_mode_weights(projection_mode, lambda_))


def _mode_weights(mode: ProjectionMode, lambda_: float) -> tuple[float, float]:
    match mode:
        case "weighted":
            return 1.0, lambda_
        case "equal":
            return 0.5, 0.5
        case "task_priority":
            return 1.0, min(lambda_, 1.0)


def _shrink(norm: float, max_norm: float) -> float:
    return max_norm / norm if norm > max_norm else 1.0
