"""Whether ranks that should hold the same weights do, to the bit, at the price of reading the weights once.

Under DDP every rank starts with the same weights and takes the same steps. Nothing checks that it stays so: a rank with
a fault in its memory, another kernel or another library goes its own way, gradients are averaged as before, and the
policy that the main rank saves is not the one that the others' losses came from.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lerobot_craft.core.ranks import gather_over_ranks, world_size

_BLOCK = 2**22  # elements that do not fill words: torch sums them in 64 bits by way of a copy
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Divergence(NamedTuple):
    """Ranks that hold something else than most."""

    ranks: list[int]
    first: str  # the name of the first thing that differs, on the first of them


def checksum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's bits, read as 64-bit integers, modulo 2^64, on its device: int64, a scalar.

    Not a float sum: that is not the same in every order, and a NaN in one element would hide all others.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    in_words, in_a_word = 0, 8 // flat.element_size()
    if flat.storage_offset() % in_a_word == 0:  # torch takes words only where they begin
        in_words = flat.numel() // in_a_word * in_a_word
        total += flat[:in_words].view(torch.int64).sum()
    for block in flat[in_words:].view(_BITS[flat.element_size()]).split(_BLOCK):
        total += block.sum(dtype=torch.int64)
    return total


def find_divergence(
    tensors: Mapping[str, Tensor], others: Mapping[str, int] | None = None, group: dist.ProcessGroup | None = None
) -> Divergence | None:
    """Compare over ranks what each of them should hold alike; a collective that gives every rank the same answer.

    Args:
        tensors: By name. Sharded ones are left out: no two ranks hold the same part.
        others: Further numbers by name, such as a digest of the multipliers; 64 bits with a sign.
        group: The ranks that share the model.
    """
    if world_size(group) == 1:
        return None
    whole = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)}
    others = others or {}
    names = [*whole, *others]
    if not names:
        return None
    extra = torch.tensor(list(others.values()), dtype=torch.int64)
    sums = torch.stack([checksum(tensor) for tensor in whole.values()]).cpu() if whole else extra.new_empty(0)
    rows = gather_over_ranks(torch.cat([sums, extra]), group)
    usual = _most_common(rows.tolist())
    odd = [rank for rank, row in enumerate(rows.tolist()) if row != usual]
    if not odd:
        return None
    differs = [a != b for a, b in zip(rows[odd[0]].tolist(), usual, strict=True)]
    return Divergence(odd, names[differs.index(True)])


def _most_common(rows: Sequence[list[int]]) -> list[int]:
    """The row that most ranks have; among equals that of the lowest rank."""
    return max(rows, key=lambda row: rows.count(row))
