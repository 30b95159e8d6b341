"""How far the student has moved from its teacher: docs/method.md, equations (1) to (5).

Drift is computed per position (the last dimension is the compared vector), averaged over a sample's valid positions,
then over samples. Inputs are widened to float32: small differences survive rounding and squares do not overflow.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from lerobot_craft.core.precision import widen
from lerobot_craft.core.tail import fold_tail

DriftKind = Literal["mse", "cosine", "l1", "kl"]
# Largest difference between two float32 forwards of the same input at different batch sizes, relative to the vector's
# largest entry. A multiple of eps, because sums inside the policy are larger than its outputs.
_VALUE_ROUNDING = 32 * torch.finfo(torch.float32).eps


def _mse(student: Tensor, teacher: Tensor) -> Tensor:
    return (student - teacher).square().mean(dim=-1)


def _l1(student: Tensor, teacher: Tensor) -> Tensor:
    # The slope of |x| is +-1 however small x is, so a rounding error would pull as hard as real drift.
    difference = student - teacher
    rounding = _VALUE_ROUNDING * teacher.abs().amax(dim=-1, keepdim=True)
    return torch.where(difference.abs() > rounding, difference, difference.detach()).abs().mean(dim=-1)


def _cosine(student: Tensor, teacher: Tensor) -> Tensor:
    # 1 - cos(s, t) = |s/|s| - t/|t||^2 / 2. Unlike `1 - cosine_similarity`, this is exactly 0 for equal inputs, never
    # negative, and precise for small drifts, where the budget lies.
    return (F.normalize(student, dim=-1) - F.normalize(teacher, dim=-1)).square().sum(dim=-1) / 2


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    # KL(teacher || student) of the softmax distributions. Rounding can leave -1e-8.
    log_p, log_q = teacher.log_softmax(dim=-1), student.log_softmax(dim=-1)
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(dim=-1)


_POSITION_DRIFT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": _mse,
    "cosine": _cosine,
    "l1": _l1,
    "kl": _kl,
}


def drift(
    student: Tensor,
    teacher: Tensor,
    kind: DriftKind = "mse",
    *,
    mask: Tensor | None = None,
    scale: Tensor | float | None = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Distance of the student's values from the teacher's: equations (1) to (4), made relative by (5).

    Args:
        student: [B, ..., D], any floating dtype; gradients flow into it.
        teacher: Same shape, treated as a constant. For `kl` both are logits over the last dimension.
        kind: `mse`, `cosine` (1 - cos, in [0, 2]), `l1` or `kl` (teacher relative to student).
        mask: Boolean, broadcastable to [B, ...] (without D); False positions are ignored, even if they hold NaN. A
            sample without a valid position has drift 0 and is left out of the mean.
        scale: Positive number, or tensor broadcastable to [B, ...] (without D), that divides position drifts: e.g. the
            variance of each layer's features, or the teacher's own error on its demonstrations.
        reduction: "mean" for a scalar, "none" for one value per sample, [B].
    """
    if kind not in _POSITION_DRIFT:
        raise ValueError(f"drift kind must be one of {', '.join(get_args(DriftKind))}; got {kind!r}")
    if student.shape != teacher.shape:
        raise ValueError(f"student {tuple(student.shape)} and teacher {tuple(teacher.shape)} must have the same shape")
    if isinstance(scale, float | int) and not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite; got {scale}")
    student, teacher = widen(student), widen(teacher.detach())
    if mask is not None:
        mask = mask.to(torch.bool).expand(student.shape[:-1])
        # Masking only the result is not enough: the gradient of an ignored NaN would be 0 * NaN.
        student = student.masked_fill(~mask.unsqueeze(-1), 0)
        teacher = teacher.masked_fill(~mask.unsqueeze(-1), 0)

    positions = _POSITION_DRIFT[kind](student, teacher)  # [B, ...]
    if scale is not None:
        positions = positions / scale
    return _reduce(positions, mask, reduction)


def token_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    mask: Tensor | None = None,
    reduction: Literal["mean", "none"] = "mean",
) -> Tensor:
    """Cross-entropy of the student on the teacher's tokens, equation (6): the `token_ce` retention loss.

    Args:
        logits: [B, T, V], any floating dtype.
        labels: [B, T], token ids; ignored positions may hold any value, including -100.
        mask: Boolean [B, T]; as in `drift`.
        reduction: "mean" for a scalar, "none" for one value per sample, [B].
    """
    if mask is None:
        mask = torch.ones_like(labels, dtype=torch.bool)
    mask = mask.to(torch.bool)
    # The label's logit against the log-sum-exp of all others: exact, without a copy of the logits.
    folded = fold_tail(logits, labels.masked_fill(~mask, 0).unsqueeze(-1)).masked_fill(~mask.unsqueeze(-1), 0)
    positions = -folded.log_softmax(dim=-1)[..., 0]  # [B, T]
    return _reduce(positions, mask, reduction)


def _reduce(positions: Tensor, mask: Tensor | None, reduction: str) -> Tensor:
    """[B, ...] position values -> one value per sample, or the mean over samples with a valid position."""
    if reduction not in ("mean", "none"):
        raise ValueError(f"reduction must be mean or none; got {reduction!r}")
    if mask is None:
        per_sample = positions.flatten(1).mean(dim=1) if positions.dim() > 1 else positions
        return per_sample.mean() if reduction == "mean" else per_sample
    positions = positions.masked_fill(~mask, 0).reshape(len(positions), -1)
    valid = mask.reshape(len(mask), -1).sum(dim=1)
    per_sample = positions.sum(dim=1) / valid.clamp_min(1)
    if reduction == "none":
        return per_sample
    return per_sample.sum() / (valid > 0).sum().clamp_min(1)
