"""A distribution over a large vocabulary as its k largest entries plus one for the rest: docs/method.md, (26), (27).

A token policy's logits cover the whole vocabulary (257,152 numbers per position for PaliGemma): too many to store. The
`k` largest and the log-sum-exp of the others are exact logits of a distribution over k + 1 outcomes. The divergence of
two distributions folded alike never exceeds the full one, and is 0 where the full ones agree.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lerobot_craft.core.precision import widen

_BLOCK = 2**24  # logits widened at once: 64 MiB in float32


def largest_entries(logits: Tensor, k: int) -> Tensor:
    """Indices of the k largest logits: [..., V] -> integer [..., min(k, V)]."""
    if k < 1:
        raise ValueError(f"at least one entry must be kept; got k={k}")
    return logits.topk(min(k, logits.shape[-1]), dim=-1).indices


def fold_tail(logits: Tensor, kept: Tensor) -> Tensor:
    """Logits at the kept entries, then the log-sum-exp of all others: [..., V], [..., k] -> [..., k + 1].

    If nothing is left over, the last entry is the lowest finite number: no probability, no gradient. Apart from the
    logits and their gradient, nothing of their size is held in memory: see `_Fold`.
    """
    if kept.shape[-1] < logits.shape[-1]:
        folded: Tensor = _Fold.apply(logits, kept)  # type: ignore[no-untyped-call]
        return folded
    head = widen(logits.gather(-1, kept))
    return torch.cat([head, head.new_full((*head.shape[:-1], 1), torch.finfo(head.dtype).min)], dim=-1)


class _Fold(torch.autograd.Function):
    """The kept entries, and tail = log sum_j exp(l_j) over the others, whose gradient is exp(l_j - tail).

    Plain autograd holds several float32 copies of the logits and two gradients: several GB for eight chunks of a
    full-size pi0_fast. This widens one slice of positions at a time, in forward and again in backward.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, kept: Tensor) -> Tensor:
        rest = [
            widen(row).scatter(-1, k, float("-inf")).logsumexp(dim=-1, keepdim=True) for row, k in _rows(logits, kept)
        ]
        tail = torch.cat(rest).reshape(*logits.shape[:-1], 1)
        ctx.save_for_backward(logits, kept, tail)
        return torch.cat([widen(logits.gather(-1, kept)), tail], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits, kept, tail = ctx.saved_tensors
        into = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        lowest = torch.finfo(tail.dtype).min  # if all others are -inf, none of them gets a gradient
        for out, row, k, t, g in _rows(into, logits, kept, tail, gradient):
            slope = (widen(row) - t.clamp_min(lowest)).exp_().mul_(g[:, -1:])
            slope.masked_fill_(g[:, -1:] == 0, 0.0)  # an ignored position may hold NaN, and 0 * NaN is NaN
            out.copy_(slope.scatter_(-1, k, g[:, :-1]))
        return into, None


def _rows(*tensors: Tensor) -> "zip[tuple[Tensor, ...]]":
    """Tensors [..., X] with equal leading dimensions, in slices [n, X] of about `_BLOCK` entries of the first."""
    rows = max(1, _BLOCK // tensors[0].shape[-1])
    return zip(*(tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in tensors), strict=True)
