"""One constrained training step for any torch module and any two losses: docs/method.md, equations (22) to (25).

    step = RetentionStep(model.parameters(), optimizer, Multipliers(Dual()))
    for batch, anchors in ...:
        report = step(lambda: task_loss(model, batch), lambda: drift(model(anchors.x), anchors.y, reduction="none"))

Order matters: the task backward finishes first, because under DDP a second backward between its forward and its
backward corrupts the reducer. On one process and without projection, the weighted retention loss is then added into the
same gradients: no memory beyond plain training, and one graph at a time. Otherwise the task gradients are set aside by
reference and retention gradients go into new memory: one gradient copy more than plain training.

A large batch may come in micro-batches. Gradients that earlier backward passes left in `.grad` count as the task's, and
`anchor_drift` may return a list of `AnchorPart`: each part's graph is freed before the next part's forward starts.

Under DDP, pass anchors through the module inside the wrapper. Under FSDP2, pass them through the wrapped root; FSDP2
requires that they reach the same parameters on every rank.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lerobot_craft.core.dual import Multipliers
from lerobot_craft.core.gradients import (
    average_over_ranks,
    combine_,
    differentiate,
    local_part,
    loud,
    squared_norm,
)
from lerobot_craft.core.precision import coarsest
from lerobot_craft.core.ranks import sum_over_ranks, world_size
from lerobot_craft.core.surgery import Gram, NonFiniteGradientError, Surgery, merge_weights
from lerobot_craft.errors import CraftError


class AnchorDrift(NamedTuple):
    """Drift of each anchor in the batch, and the constraint group of each."""

    per_sample: Tensor  # [B], differentiable
    groups: Tensor | None = None  # [B], integer indices into Multipliers.groups; None: all in group 0
    dtype: torch.dtype | None = None  # dtype the student computed in; None: the parameters' coarsest dtype


class AnchorPart(NamedTuple):
    """One of several parts of a step's anchors. Its groups are known before its drift: a group's mean needs all."""

    groups: Tensor  # [B], as in `AnchorDrift`
    drift: Callable[[], "Tensor | AnchorDrift"]  # called when the part's turn has come; of the same groups


AnchorDrifts = Tensor | AnchorDrift | list[AnchorPart]


@dataclass(frozen=True)
class AnchorReport:
    """Measurements of one anchor step. Losses are means over all ranks; gradients are those before merging.

    `dot`, `cos` and `retention_norm` are None if the two gradients were added directly and never held separately.
    """

    retention_loss: float  # mean over the groups present, in the budget's unit
    group_losses: tuple[float | None, ...]  # per group, in the budget's unit; None: the batch has no anchor of it
    lambdas: tuple[float, ...]  # as used in this step, before its dual update
    epsilon: float
    conflict: bool
    bounded: bool  # the weighted retention gradient was shortened to its bound
    dot: float | None
    cos: float | None
    retention_norm: float | None
    task_weight: float
    retention_weight: float
    retention_bytes: int  # size of this rank's retention gradient: the memory beyond plain training
    part_cosines: dict[str, float]  # cosine within each part of the parameters that both gradients reach


@dataclass(frozen=True)
class StepReport:
    """Measurements of one step. `anchor` is None on steps without an anchor batch."""

    step: int  # counted from 0
    task_loss: Tensor  # this rank's, detached, on its device; the caller decides when to read it
    task_norm: float  # of the task gradient, before any bound
    merged_norm: float  # of the gradient that the optimizer uses
    anchor: AnchorReport | None


def no_budget(step: int) -> float:
    """A budget of zero at every step: any drift raises the multiplier."""
    return 0.0


class RetentionStep:
    """Task backward, set aside, retention backward, reduce, surgery, optimizer, dual: in this order.

    Args:
        parameters: Those without `requires_grad` are skipped.
        optimizer: Steps on the merged gradient.
        multipliers: One per constraint group.
        surgery: Projection, merge mode and bounds.
        epsilon: The budget at a step, e.g. a partial of `epsilon_schedule`.
        units: Per group, the drift that counts as 1 against the budget, e.g. the teacher's own error on that task's
            demonstrations. Multipliers move by the drift in this unit; the gradient is that of the raw drift, so that
            lambda stays comparable with the task loss (25). Default 1: an absolute budget.
        retention_freq: K. Anchors are used on every K-th step and count K times (22).
        backward: Differentiates the task loss; `accelerator.backward` under accelerate. It must leave unscaled
            gradients: float16 loss scaling is not supported, bfloat16 needs none.
        group: The ranks that share this model; default: the default group if torch.distributed is initialized.
        follows_anchors: Whether multipliers follow the drift of the trained anchors. If not, the caller measures other
            anchors and passes their drift to `measured`.
        parts: A name for each of `parameters`; the two gradients are then also compared within each name.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        optimizer: torch.optim.Optimizer,
        multipliers: Multipliers,
        *,
        surgery: Surgery | None = None,
        epsilon: Callable[[int], float] = no_budget,
        units: Sequence[float] | None = None,
        retention_freq: int = 1,
        backward: Callable[[Tensor], None] = torch.autograd.backward,
        group: dist.ProcessGroup | None = None,
        follows_anchors: bool = True,
        parts: Sequence[str] | None = None,
    ) -> None:
        if retention_freq < 1:
            raise ValueError(f"retention_freq must be at least 1; got {retention_freq}")
        self.units = [1.0] * len(multipliers.groups) if units is None else [float(u) for u in units]
        if len(self.units) != len(multipliers.groups) or not all(0 < u < math.inf for u in self.units):
            raise ValueError(f"{len(multipliers.groups)} positive units are needed, one per group; got {units}")
        given = list(parameters)
        self.parameters = [p for p in given if p.requires_grad]
        self._dtype = coarsest(p.dtype for p in given)
        names = [name for p, name in zip(given, parts, strict=True) if p.requires_grad] if parts is not None else []
        self._part_names = list(dict.fromkeys(names))
        self._parts = [self._part_names.index(name) for name in names]
        if not self.parameters:
            raise CraftError("there is nothing to train: every parameter is frozen")
        self.optimizer = optimizer
        self.multipliers = multipliers
        self.surgery = surgery or Surgery()
        self.epsilon = epsilon
        self.retention_freq = retention_freq
        self.step = 0
        self.follows_anchors = follows_anchors
        self._backward = backward
        self._group = group

    def __call__(self, task_loss: Callable[[], Tensor], anchor_drift: Callable[[], AnchorDrifts]) -> StepReport:
        """Run one whole step. Losses are functions, so that each forward runs at the right time."""
        report = self.backward(task_loss, anchor_drift)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.advance(report)
        return report

    def is_anchor_step(self) -> bool:
        """Whether the next step uses anchors: the K-th, 2K-th, ..."""
        return (self.step + 1) % self.retention_freq == 0

    def backward(self, task_loss: Callable[[], Tensor], anchor_drift: Callable[[], AnchorDrifts]) -> StepReport:
        """Leave the merged gradient in `.grad`. On an error, clear all gradients, so that none is half-finished."""
        try:
            loss = task_loss()
            self._backward(loud(loss))
            if self.is_anchor_step():
                if self.surgery.is_sum and world_size(self._group) == 1:
                    return self._add(loss.detach(), anchor_drift)
                return self._merge(loss.detach(), self._take_gradients(), anchor_drift())
            return self._bound_task(loss.detach())
        except BaseException:
            self._take_gradients()
            raise

    def advance(self, report: StepReport) -> None:
        """Call after the optimizer step: moves the multipliers by the measured drift and counts the step."""
        if report.anchor is not None and self.follows_anchors:
            self.multipliers.follow(
                report.anchor.group_losses, report.anchor.epsilon, elapsed_steps=self.retention_freq
            )
        self.step += 1

    def measured(self, drifts: Sequence[float | None]) -> None:
        """Move the multipliers by the drift of anchors not trained on, per group, in the budget's unit."""
        self.multipliers.follow(drifts, self.epsilon(max(0, self.step - 1)))

    def state_dict(self) -> dict[str, Any]:
        """The step and the multipliers, as JSON values."""
        return {"step": self.step, "multipliers": self.multipliers.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        if not {"step", "multipliers"} <= set(state):
            raise CraftError("the saved step or its multipliers are missing: resume from another checkpoint")
        self.multipliers.load_state_dict(state["multipliers"])
        self.step = int(state["step"])

    def _take_gradients(self) -> list[Tensor | None]:
        gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        return gradients

    def _bound_task(self, task_loss: Tensor) -> StepReport:
        gradients = [p.grad for p in self.parameters]
        norm = self._norm("task")
        bound = min(self.surgery.task_max_norm, self.surgery.merged_max_norm)
        if norm > bound:
            combine_(gradients, [None] * len(gradients), bound / norm, 0.0)
        return StepReport(self.step, task_loss, norm, min(norm, bound), anchor=None)

    def _constraint(self, found: AnchorDrifts) -> "_Constraint":
        lambdas = tuple(self.multipliers.values)
        if isinstance(found, list):
            return _Constraint.of(found, lambdas, self._group)
        drift = found if isinstance(found, AnchorDrift) else AnchorDrift(found.reshape(-1))
        part = AnchorPart(_group_indices(drift, len(lambdas)), lambda: drift)
        return _Constraint.of([part], lambdas, self._group)

    def _budget(self) -> float:
        epsilon = self.epsilon(self.step)
        if not 0 <= epsilon < math.inf:  # a NaN would silently stop the multipliers
            raise ValueError(f"the budget must be finite and not negative; it is {epsilon} at step {self.step}")
        return epsilon

    def _add(self, task_loss: Tensor, anchor_drift: Callable[[], AnchorDrifts]) -> StepReport:
        """Add K lambda r to t by a second backward into the same gradients; then bound the sum (16)."""
        epsilon = self._budget()
        task_norm = self._norm("task")
        constraint = self._constraint(anchor_drift())
        weight = self.retention_freq * constraint.lambda_
        for loss in constraint.losses():
            torch.autograd.backward(loud(weight * loss), inputs=self.parameters)
        norm = self._norm("retention")
        shrink = min(1.0, self.surgery.merged_max_norm / norm) if norm > 0 else 1.0
        if shrink < 1:
            gradients = [p.grad for p in self.parameters]
            combine_(gradients, [None] * len(gradients), shrink, 0.0)
        group_losses = constraint.group_losses(self.units, self._group)
        present = [loss for loss in group_losses if loss is not None]
        anchor = AnchorReport(
            retention_loss=sum(present) / len(present),
            group_losses=group_losses,
            lambdas=tuple(self.multipliers.values),
            epsilon=epsilon,
            conflict=False,
            bounded=False,
            dot=None,
            cos=None,
            retention_norm=None,
            task_weight=shrink,
            retention_weight=weight * shrink,
            retention_bytes=0,
            part_cosines={},
        )
        return StepReport(self.step, task_loss, task_norm, norm * shrink, anchor)

    def _norm(self, which: Literal["task", "retention"]) -> float:
        """Norm of the current `.grad`."""
        norm = math.sqrt(squared_norm([p.grad for p in self.parameters], self._group))
        if not math.isfinite(norm):
            raise NonFiniteGradientError(which)
        return norm

    def _merge(self, task_loss: Tensor, task: list[Tensor | None], found: AnchorDrifts) -> StepReport:
        epsilon = self._budget()
        lambdas = tuple(self.multipliers.values)
        constraint = self._constraint(found)
        losses = (loud(loss) for loss in constraint.losses())
        retention = average_over_ranks(
            self.parameters, differentiate(losses, self.parameters, self._group), self._group
        )
        dtype = constraint.dtype or self._dtype
        gram, of_parts = Gram.by_part(task, retention, self._parts, self._group, dtype)
        weights = merge_weights(gram, constraint.lambda_, self.surgery, retention_gain=self.retention_freq)
        retention_bytes = sum(local_part(g).nbytes for g in retention if g is not None)
        merged = combine_(task, retention, weights.task, weights.retention)
        for p, g in zip(self.parameters, merged, strict=True):
            p.grad = g
        group_losses = constraint.group_losses(self.units, self._group)
        measured = [loss for loss in group_losses if loss is not None]
        anchor = AnchorReport(
            retention_loss=sum(measured) / len(measured),
            group_losses=group_losses,
            lambdas=lambdas,
            epsilon=epsilon,
            conflict=weights.conflict,
            bounded=weights.bounded,
            dot=gram.tr,
            cos=gram.cos,
            retention_norm=gram.retention_norm,
            task_weight=weights.task,
            retention_weight=weights.retention,
            retention_bytes=retention_bytes,
            part_cosines={
                name: part.cos
                for name, part in zip(self._part_names, of_parts, strict=True)
                if gram.has_direction and part.has_direction
            },
        )
        return StepReport(self.step, task_loss, gram.task_norm, weights.norm, anchor)


class _Constraint:
    """The retention loss whose gradient enters surgery, equations (23) and (24).

    With G groups the Lagrangian contains mean_g(lambda_g L_g). It is split into a scalar, lambda = mean_g(lambda_g),
    and a loss, sum_g (lambda_g / sum lambda) L_g, so that surgery sees one gradient and one multiplier. Counts are
    totals over all parts and ranks, so the sum over parts, averaged over ranks, equals the gradient of one rank with
    all anchors in one batch.
    """

    def __init__(self, parts: list[AnchorPart], lambda_: float, weights: Tensor, counts: Tensor) -> None:
        self.lambda_ = lambda_
        self.dtype: torch.dtype | None = None  # what the last part was computed in
        self._parts = parts
        self._weights = weights  # [G], of each anchor of a group
        self._counts = counts  # [G]
        self._sums = torch.zeros(len(counts), dtype=torch.float64)  # [G], of the drifts of this rank

    @classmethod
    def of(cls, parts: list[AnchorPart], lambdas: Sequence[float], group: dist.ProcessGroup | None) -> "_Constraint":
        mine = torch.zeros(len(lambdas), dtype=torch.long)
        for part in parts:
            mine += torch.bincount(part.groups.cpu().long(), minlength=len(lambdas))
        counts = sum_over_ranks(mine, group)
        present = counts > 0
        if not present.any():
            raise CraftError("the anchor batch is empty on every rank: check anchor_batch_size and the cache")
        multipliers = torch.tensor(lambdas, dtype=torch.float64) * present
        total = multipliers.sum()
        shares = multipliers / total if total > 0 else present / present.sum()
        weights = world_size(group) * (shares / counts.clamp_min(1))
        return cls(parts, (total / present.sum()).item(), weights, counts)

    def losses(self) -> Iterator[Tensor]:
        """The loss of each part, which is to be differentiated before the next one is asked for."""
        for part in self._parts:
            yield self._loss(part)

    def _loss(self, part: AnchorPart) -> Tensor:
        found = part.drift()
        drift = found if isinstance(found, AnchorDrift) else AnchorDrift(found.reshape(-1))
        groups = _group_indices(drift, len(self._counts))
        if not torch.equal(groups, part.groups.cpu().long()):
            raise ValueError(f"a part of the anchors has the groups {groups.tolist()}, not {part.groups.tolist()}")
        self.dtype = drift.dtype
        self._sums.index_add_(0, groups, drift.per_sample.detach().cpu().double())
        loss = (drift.per_sample * self._weights[groups].to(drift.per_sample)).sum()
        if not loss.requires_grad:
            raise CraftError(
                "the retention loss depends on no trainable parameter: unfreeze what the anchors' values are computed "
                "from, or retain a value that the trained parameters reach"
            )
        return loss

    def group_losses(self, units: Sequence[float], group: dist.ProcessGroup | None) -> tuple[float | None, ...]:
        sums = sum_over_ranks(self._sums, group)
        return tuple(
            s / n / unit if n else None for s, n, unit in zip(sums.tolist(), self._counts.tolist(), units, strict=True)
        )


def _group_indices(drift: AnchorDrift, num_groups: int) -> Tensor:
    if drift.per_sample.dim() != 1:
        raise ValueError(f"per_sample must be one drift per anchor, [B]; got {tuple(drift.per_sample.shape)}")
    if drift.groups is None:
        if num_groups > 1:
            raise ValueError(f"there are {num_groups} multipliers, so each anchor must say its group")
        return torch.zeros(len(drift.per_sample), dtype=torch.long)
    groups = drift.groups.cpu().long()
    if groups.shape != drift.per_sample.shape:
        raise ValueError(f"{len(drift.per_sample)} anchors need as many group indices; got {tuple(groups.shape)}")
    if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
        raise ValueError(f"group indices must lie in 0..{num_groups - 1}; got {groups.unique().tolist()}")
    return groups
