"""A distribution over a large vocabulary as its largest entries and one for all the rest: docs/method.md, (26), (27).

A token policy's logits at one position are a vector over the whole vocabulary: 257,152 numbers for PaliGemma. Storing
the teacher's is out of the question. Its `k` largest logits and the log-sum-exp of the others are the logits of a
distribution over k + 1 outcomes, exactly; `drift(..., kind="kl")` compares it with the student's, folded in the same
places. The divergence of folded distributions never exceeds that of the full ones, and is 0 where those agree.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lerobot_craft.core.precision import widen

_BLOCK = 2**24  # logits that are widened at a time: 64 MiB in float32


def largest_entries(logits: Tensor, k: int) -> Tensor:
    """Where the k largest logits are: [..., V] -> integer [..., min(k, V)]."""
    if k < 1:
        raise ValueError(f"at least one entry must be kept; got k={k}")
    return logits.topk(min(k, logits.shape[-1]), dim=-1).indices


def fold_tail(logits: Tensor, kept: Tensor) -> Tensor:
    """Logits at the kept entries, then the log-sum-exp of all others: [..., V], [..., k] -> [..., k + 1].

    With nothing left over, the last entry is the lowest finite number, so that it has no probability and no gradient.
    Beside the logits themselves and their gradient, nothing of their size is held: see `_Fold`.
    """
    if kept.shape[-1] < logits.shape[-1]:
        folded: Tensor = _Fold.apply(logits, kept)  # type: ignore[no-untyped-call]
        return folded
    head = widen(logits.gather(-1, kept))
    return torch.cat([head, head.new_full((*head.shape[:-1], 1), torch.finfo(head.dtype).min)], dim=-1)


class _Fold(torch.autograd.Function):
    """The kept entries as they are, and tail = log sum_j exp(l_j) over the others, whose gradient is exp(l_j - tail).

    Autograd's own way holds copies of the logits in float32 (widened, without the kept ones, within logsumexp) and two
    gradients: for eight chunks of a full-size pi0_fast that is several GB. Here a slice of positions is widened at a
    time, and once more on the way back.
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
        lowest = torch.finfo(tail.dtype).min  # where all others are -inf, none of them has a gradient
        for out, row, k, t, g in _rows(into, logits, kept, tail, gradient):
            slope = (widen(row) - t.clamp_min(lowest)).exp_().mul_(g[:, -1:])
            slope.masked_fill_(g[:, -1:] == 0, 0.0)  # an ignored position may hold NaN, and 0 * NaN is NaN
            out.copy_(slope.scatter_(-1, k, g[:, :-1]))
        return into, None


def _rows(*tensors: Tensor) -> "zip[tuple[Tensor, ...]]":
    """Tensors [..., X] with the same dimensions before the last, in slices [n, X] of `_BLOCK` entries of the first."""
    rows = max(1, _BLOCK // tensors[0].shape[-1])
    return zip(*(tensor.reshape(-1, tensor.shape[-1]).split(rows) for tensor in tensors), strict=True)
