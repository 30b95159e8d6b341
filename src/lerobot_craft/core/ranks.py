"""The processes that train one model: their number, and small values that they share.

Everything here is a collective: all ranks of the group must call it, in the same order.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


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
