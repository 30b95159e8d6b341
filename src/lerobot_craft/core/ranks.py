"""The processes that train one model: their number, small values that they share, and whether their weights are equal.

Everything here is a collective: all ranks of the group must call it, in the same order.

Under DDP every rank starts from the same weights and takes the same steps, but nothing checks that they stay equal. If
one rank drifts (a memory fault, a different kernel), the saved policy did not produce the other ranks' losses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks in the group (default: all); 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of a small CPU tensor over ranks, on the CPU."""
    if world_size(group) == 1:
        return values
    shared = values.to(_device(group), copy=True)
    dist.all_reduce(shared, group=group)
    return shared.cpu()


def gather_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """A small CPU tensor [n] from every rank, in rank order: [ranks, n], on the CPU."""
    world = world_size(group)
    if world == 1:
        return values.unsqueeze(0)
    mine = values.to(_device(group)).contiguous()
    rows = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows).cpu()


def main_decides(question: Callable[[], bool], group: dist.ProcessGroup | None = None) -> bool:
    """The main rank's answer, on every rank; only the main rank asks.

    Use it if ranks could see different answers, e.g. whether a shared file exists, and then call other collectives.
    """
    if world_size(group) == 1:
        return question()
    answer = torch.tensor([dist.get_rank(group) == 0 and question()], dtype=torch.uint8, device=_device(group))
    dist.broadcast(answer, group_src=0, group=group)
    return bool(answer.item())


def main_says(text: Callable[[], str], group: dist.ProcessGroup | None = None) -> str:
    """The main rank's text, on every rank; only the main rank computes it."""
    if world_size(group) == 1:
        return text()
    said = list(text().encode()) if dist.get_rank(group) == 0 else []
    length = torch.tensor([len(said)], device=_device(group))
    dist.broadcast(length, group_src=0, group=group)
    content = torch.tensor(said or [0] * int(length.item()), dtype=torch.uint8, device=_device(group))
    dist.broadcast(content, group_src=0, group=group)
    return bytes(content.tolist()).decode()


def _device(group: dist.ProcessGroup | None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"  # NCCL moves device memory only


_BLOCK = 2**22  # torch makes a 64-bit copy of elements that it cannot read as words, so they are summed in blocks
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Divergence(NamedTuple):
    """Ranks whose values differ from those of the majority."""

    ranks: list[int]
    first: str  # name of the first value that differs on the first of these ranks


def checksum(tensor: Tensor) -> Tensor:
    """Sum a tensor's bits as 64-bit integers modulo 2^64: a scalar int64 on the tensor's device.

    A float sum would depend on the order, and one NaN would hide all other values.
    """
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    in_words, in_a_word = 0, 8 // flat.element_size()
    if flat.storage_offset() % in_a_word == 0:  # torch can only view aligned memory as 64-bit words
        in_words = flat.numel() // in_a_word * in_a_word
        total += flat[:in_words].view(torch.int64).sum()
    for block in flat[in_words:].view(_BITS[flat.element_size()]).split(_BLOCK):
        total += block.sum(dtype=torch.int64)
    return total


def find_divergence(
    tensors: Mapping[str, Tensor], others: Mapping[str, int] | None = None, group: dist.ProcessGroup | None = None
) -> Divergence | None:
    """Compare values that should be equal on all ranks. A collective: every rank gets the same answer.

    Args:
        tensors: By name. Sharded tensors are skipped, because each rank holds a different part.
        others: More numbers by name, such as a digest of the multipliers; signed 64-bit.
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
    """The row that most ranks hold; on a tie, the lowest rank's."""
    return max(rows, key=lambda row: rows.count(row))
