"""A distribution over a large vocabulary as its largest entries and one for all the rest: docs/method.md, (26), (27).

A token policy's logits at one position are a vector over the whole vocabulary: 257,152 numbers for PaliGemma. Storing
the teacher's is out of the question. Its `k` largest logits and the log-sum-exp of the others are the logits of a
distribution over k + 1 outcomes, exactly; `drift(..., kind="kl")` compares it with the student's, folded in the same
places. The divergence of folded distributions never exceeds that of the full ones, and is 0 where those agree.
"""

import torch
from torch import Tensor

from lerobot_craft.core.precision import widen


def largest_entries(logits: Tensor, k: int) -> Tensor:
    """Where the k largest logits are: [..., V] -> integer [..., min(k, V)]."""
    if k < 1:
        raise ValueError(f"at least one entry must be kept; got k={k}")
    return logits.topk(min(k, logits.shape[-1]), dim=-1).indices


def fold_tail(logits: Tensor, kept: Tensor) -> Tensor:
    """Logits at the kept entries, then the log-sum-exp of all others: [..., V], [..., k] -> [..., k + 1].

    With nothing left over, the last entry is the lowest finite number, so that it has no probability and no gradient.
    """
    logits = widen(logits)
    head = logits.gather(-1, kept)
    if kept.shape[-1] == logits.shape[-1]:
        tail = logits.new_full((*logits.shape[:-1], 1), torch.finfo(logits.dtype).min)
    else:
        tail = logits.scatter(-1, kept, float("-inf")).logsumexp(dim=-1, keepdim=True)
    return torch.cat([head, tail], dim=-1)
