"""The processes that train one model: how many there are, and small numbers that they share.

Everything here is a collective: all ranks of the group call it, in the same order.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Number of ranks of the group, or of the default one; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def sum_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum of a small CPU tensor over ranks, on the CPU."""
    if world_size(group) == 1:
        return values
    shared = values.to(_device(group), copy=True)
    dist.all_reduce(shared, group=group)
    return shared.cpu()


def gather_over_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """A small CPU tensor [n] of every rank, in their order: [ranks, n], on the CPU."""
    world = world_size(group)
    if world == 1:
        return values.unsqueeze(0)
    mine = values.to(_device(group)).contiguous()
    rows = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(rows, mine, group=group)
    return torch.stack(rows).cpu()


def _device(group: dist.ProcessGroup | None) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"  # NCCL moves device memory only
