"""Lists of gradients as one long vector: inner products, in-place combination, averaging over ranks.

A gradient list has one entry per parameter, in a fixed order; `None` means zeros. Entries are tensors (replicated, as
under DDP) or DTensors (sharded, as under FSDP2). Products are summed over ranks: one shard's can have the wrong sign.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lerobot_craft.core.ranks import sum_over_ranks, world_size

Gradients = Sequence[Tensor | None]


@dataclass
class _Scalars:
    """Inner products of blocks, still on their devices, and the index of each block's parameter part."""

    values: list[Tensor] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def append(self, value: Tensor, part: int) -> None:
        self.values.append(value)
        self.parts.append(part)


# Inner products are computed in blocks. On a CPU both blocks stay in cache for all three products, so memory is read
# once instead of twice. On an accelerator a block only limits the float32 copy of low-precision gradients.
_CPU_BLOCK = 2**19
_ACCELERATOR_BLOCK = 2**25
# float32 squares lose digits below 1e-38, so sums of squares below this may be inexact.
_SHORT = 1e-20
_BUCKET_BYTES = 2**25  # per all-reduce: few messages, and much smaller than a gradient copy


def differentiate(
    losses: Iterable[Tensor], parameters: Sequence[Tensor], group: dist.ProcessGroup | None = None
) -> list[Tensor | None]:
    """Gradient of the sum of `losses` for each parameter, in separate memory. `.grad` is empty before and after.

    Each loss is differentiated before the next one is computed, so only one graph exists at a time.

    `loss.backward()` would run DDP's hooks, which mark parameters as used; DDP's next backward fails if the task does
    not use them. FSDP2 reduces gradients in its backward hooks, so sharded parameters need a real backward.
    """
    sharded = any(isinstance(p, DTensor) for p in parameters)
    total: list[Tensor | None] = [None] * len(parameters)
    for number, loss in enumerate(losses):
        if sharded or (number > 0 and world_size(group) == 1):  # into what is there: no second copy
            for p, g in zip(parameters, total, strict=True):
                p.grad = g
            torch.autograd.backward(loss, inputs=None if sharded else parameters)
            total = [p.grad for p in parameters]
            for p in parameters:
                p.grad = None
        else:
            gradients = _owned(torch.autograd.grad(loss, parameters, allow_unused=True))
            total = combine_(total, gradients, 1.0, 1.0) if number > 0 else gradients
    return total


def loud(loss: Tensor) -> Tensor:
    """Return the loss. If it is NaN or infinite, its gradient becomes NaN everywhere, on all ranks.

    Some losses hide a bad value: the slope of |x| is 0 at NaN and 1 at infinity, so a NaN L1 loss would silently move
    the weights or skip part of the batch. The check reads no value, so it does not wait for the device.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)


def inner_products(a: Gradients, b: Gradients, group: dist.ProcessGroup | None = None) -> tuple[float, float, float]:
    """(<a,a>, <a,b>, <b,b>) over all parameters and ranks: equation (11).

    Blocks are summed in float32 (float64 for float64 gradients), and their sums over blocks and ranks in float64. If
    float32 cannot hold a square, a second pass uses float64. Ordinary gradients never need it.
    """
    return inner_products_by_part(a, b, (), group)[0]


def inner_products_by_part(
    a: Gradients, b: Gradients, parts: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[tuple[float, float, float]]:
    """The products over all parameters, bit-identical to `inner_products`, then those of each part.

    Both come from the same block products, so parts need no extra pass over the gradients and no extra message.

    Args:
        a: Gradients.
        b: Other gradients of the same parameters.
        parts: The part each parameter belongs to, counted from 0; empty: no parts.
        group: The ranks that share the model.
    """
    found = _products(a, b, parts, group, torch.float32)
    (aa, _, bb), *_ = found
    # All ranks hold the same numbers, so all take the same branch.
    short = 0 <= aa < _SHORT or (0 <= bb < _SHORT and any(g is not None for g in b))
    if short or not (math.isfinite(aa) and math.isfinite(bb)):
        return _products(a, b, parts, group, torch.float64)
    return found


def _products(
    a: Gradients, b: Gradients, parts: Sequence[int], group: dist.ProcessGroup | None, at_least: torch.dtype
) -> list[tuple[float, float, float]]:
    # Keyed by a rank's weight in the sum over ranks: replicated values must count once.
    products: dict[float, list[_Scalars]] = defaultdict(lambda: [_Scalars(), _Scalars(), _Scalars()])
    world = world_size(group)
    for x, y, part in zip(a, b, parts or [0] * len(a), strict=True):
        present = x if x is not None else y
        if present is None:
            continue
        aa, ab, bb = products[_share(present, world)]
        for u, v in zip_longest(_blocks(x, at_least), _blocks(y, at_least)):
            if u is not None:
                aa.append(u.dot(u), part)
            if v is not None:
                bb.append(v.dot(v), part)
            if u is not None and v is not None:
                ab.append(u.dot(v), part)
    local = torch.zeros(1 + (max(parts) + 1 if parts else 0), 3, dtype=torch.float64)  # [whole and parts, products]
    for share, kinds in products.items():
        for column, (scalars, values) in enumerate(zip(kinds, _on_cpu(kinds), strict=True)):
            local[0, column] += share * values.sum()
            if parts:
                local[1:, column].index_add_(0, torch.tensor(scalars.parts, dtype=torch.long), share * values)
    return [(aa, ab, bb) for aa, ab, bb in sum_over_ranks(local, group).tolist()]


def squared_norm(gradients: Gradients, group: dist.ProcessGroup | None = None) -> float:
    """<g,g> over all parameters and ranks."""
    return inner_products(gradients, [None] * len(gradients), group)[0]


@torch.no_grad()
def combine_(a: Gradients, b: Gradients, weight_a: float, weight_b: float) -> list[Tensor | None]:
    """weight_a * a + weight_b * b, in place: into `a` where it exists, else into `b`. No tensor is allocated.

    DDP's `gradient_as_bucket_view` makes task gradients views of its buckets; writing into `a` preserves that. With
    weight_b = 0, gradients missing in `a` stay None: an optimizer with weight decay treats zeros differently.
    """
    if weight_b == 0.0:
        b = [None] * len(b)
    pairs = list(zip(a, b, strict=True))
    in_a = [x for x, _ in pairs if x is not None]
    only_b = [y for x, y in pairs if x is None and y is not None]
    both = [(x, y) for x, y in pairs if x is not None and y is not None]
    if in_a and weight_a != 1.0:
        torch._foreach_mul_(in_a, weight_a)
    if both:
        torch._foreach_add_([x for x, _ in both], [y for _, y in both], alpha=weight_b)
    if only_b:
        torch._foreach_mul_(only_b, weight_b)
    return [y if x is None else x for x, y in pairs]


@torch.no_grad()
def average_over_ranks(
    parameters: Sequence[Tensor], gradients: Gradients, group: dist.ProcessGroup | None = None
) -> list[Tensor | None]:
    """Mean of the gradients over ranks, in place. DTensors are returned unchanged: FSDP2 has already reduced them.

    A parameter that only some ranks reached counts as zero on the others. Ranks first agree on this to avoid deadlock.
    """
    world = world_size(group)
    if world == 1:
        return list(gradients)
    reached = sum_over_ranks(torch.tensor([g is not None for g in gradients], dtype=torch.int32), group)
    filled = [
        torch.zeros_like(p) if g is None and ranks > 0 else g
        for p, g, ranks in zip(parameters, gradients, reached.tolist(), strict=True)
    ]
    for bucket in _buckets([g for g in filled if g is not None and not isinstance(g, DTensor)]):
        _average_bucket(bucket, world, group)
    return filled


def local_part(gradient: Tensor) -> Tensor:
    """This rank's part of a gradient."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _owned(gradients: Gradients) -> list[Tensor | None]:
    """The same gradients, none sharing memory: autograd may return one tensor, or views of it, for several."""
    owners: set[int] = set()
    owned: list[Tensor | None] = []
    for g in gradients:
        if g is not None:
            storage = g.untyped_storage()
            if storage.data_ptr() in owners or storage.nbytes() != g.nbytes:
                g = g.clone(memory_format=torch.contiguous_format)
            owners.add(g.untyped_storage().data_ptr())
        owned.append(g)
    return owned


def _blocks(gradient: Tensor | None, at_least: torch.dtype) -> Iterator[Tensor]:
    """This rank's part of a gradient: flat blocks in at least the precision `at_least`."""
    if gradient is None:
        return
    flat = local_part(gradient).detach().reshape(-1)
    for block in flat.split(_CPU_BLOCK if flat.device.type == "cpu" else _ACCELERATOR_BLOCK):
        yield block.to(torch.promote_types(block.dtype, at_least))


def _share(gradient: Tensor, world: int) -> float:
    """1 / (number of ranks that hold the same values), so that a sum over all ranks counts each value once."""
    if not isinstance(gradient, DTensor):
        return 1 / world
    if any(placement.is_partial() for placement in gradient.placements):
        raise ValueError("a gradient is a DTensor with partial sums: reduce it before surgery")
    sharded = [
        gradient.device_mesh.size(dim)
        for dim, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    ]
    return math.prod(sharded) / world


def _on_cpu(kinds: list[_Scalars]) -> tuple[Tensor, ...]:
    """The scalars of each kind as one float64 tensor, in a single transfer: each transfer waits for the device."""
    scalars = [scalar for kind in kinds for scalar in kind.values]
    values = torch.stack([s.to(scalars[0].device) for s in scalars]).cpu().double()
    return tuple(values.split([len(kind.values) for kind in kinds]))


def _average_bucket(bucket: list[Tensor], world: int, group: dist.ProcessGroup | None) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():  # no copy: it may be an embedding table of several gigabytes
        dist.all_reduce(bucket[0], group=group)
        bucket[0].div_(world)
        return
    flat = torch.cat([g.reshape(-1) for g in bucket])
    dist.all_reduce(flat, group=group)
    flat.div_(world)
    for g, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        g.copy_(mean.view_as(g))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of consecutive gradients with one dtype and device, each about `_BUCKET_BYTES` large."""
    bucket: list[Tensor] = []
    size = 0
    for g in gradients:
        fits = not bucket or (g.dtype == bucket[0].dtype and g.device == bucket[0].device)
        if bucket and (not fits or size + g.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(g)
        size += g.nbytes
    if bucket:
        yield bucket
