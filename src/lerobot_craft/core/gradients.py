"""Lists of gradients as one long vector: inner products, in-place combination, averaging over ranks.

A gradient list has one entry per parameter, in a fixed order; `None` stands for a gradient of zeros. Entries may be
plain tensors (replicated on every rank, as under DDP) or DTensors (sharded, as under FSDP2). An inner product of one
shard can even have the wrong sign, so every product is summed over ranks before anybody looks at it.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    """Inner products of blocks, still on their devices, and the part of the parameters that each belongs to."""

    values: list[Tensor] = field(default_factory=list)
    parts: list[int] = field(default_factory=list)

    def append(self, value: Tensor, part: int) -> None:
        self.values.append(value)
        self.parts.append(part)


# Inner products walk the gradients in blocks. On a CPU both blocks stay in the cache while their three products are
# taken, so memory is read once instead of twice; on an accelerator a block only bounds the float32 copy of
# low-precision gradients.
_CPU_BLOCK = 2**19
_ACCELERATOR_BLOCK = 2**25
# Squares in float32 end at 1e38 and lose digits below 1e-38; sums of them below this may be made of such.
_SHORT = 1e-20
_BUCKET_BYTES = 2**25  # per all-reduce: few messages, and far less than a gradient copy


def differentiate(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradient of `loss` for each parameter, in memory of its own. `.grad` must be empty, and is afterwards.

    Not by `loss.backward()`: that runs the hooks which DDP hangs on every parameter. Outside DDP's own backward they
    still mark the parameter as used, and if the task does not use it, DDP's next backward fails. FSDP2 is the other
    way round: it reduces gradients in its backward hooks, so sharded parameters need a real backward.
    """
    if any(isinstance(p, DTensor) for p in parameters):
        torch.autograd.backward(loss)
        gradients = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        return gradients
    return _owned(torch.autograd.grad(loss, parameters, allow_unused=True))


def loud(loss: Tensor) -> Tensor:
    """The loss itself; if it is NaN or infinite, one whose gradient is NaN throughout, here and on all ranks.

    Some losses hide what they are: the slope of |x| is 0 at NaN and 1 at infinity, so an L1 loss of NaN would move the
    weights, or leave a part of the batch out, and nobody would know. No value is read: nothing waits for the device.
    """
    return loss * torch.where(loss.detach().isfinite(), 1.0, math.nan).to(loss.dtype)


def inner_products(a: Gradients, b: Gradients, group: dist.ProcessGroup | None = None) -> tuple[float, float, float]:
    """(<a,a>, <a,b>, <b,b>) over all parameters and ranks: equation (11).

    Each block is summed in float32 (float64 for float64 gradients), blocks and ranks in float64. Where float32 could
    not hold a square, everything is summed in float64: a second pass, which ordinary gradients never need.
    """
    return inner_products_by_part(a, b, (), group)[0]


def inner_products_by_part(
    a: Gradients, b: Gradients, parts: Sequence[int], group: dist.ProcessGroup | None = None
) -> list[tuple[float, float, float]]:
    """The products over all parameters, as `inner_products` has them to the bit, then those of each part of them.

    They are sums of the same numbers, which have come from the device and cross ranks together already: a part costs
    no pass over a gradient and no message.

    Args:
        a: Gradients.
        b: Others of the same parameters.
        parts: Which part each parameter belongs to, counted from 0; empty: no parts.
        group: The ranks that share the model.
    """
    found = _products(a, b, parts, group, torch.float32)
    (aa, _, bb), *_ = found
    # The same numbers on every rank, so all go the same way.
    short = 0 <= aa < _SHORT or (0 <= bb < _SHORT and any(g is not None for g in b))
    if short or not (math.isfinite(aa) and math.isfinite(bb)):
        return _products(a, b, parts, group, torch.float64)
    return found


def _products(
    a: Gradients, b: Gradients, parts: Sequence[int], group: dist.ProcessGroup | None, at_least: torch.dtype
) -> list[tuple[float, float, float]]:
    # Keyed by the weight of a rank's values in the sum over ranks: what is held twice must count once.
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

    Writing into `a` matters under DDP, whose `gradient_as_bucket_view` makes the task gradients views of its own
    buckets: they stay so. With weight_b = 0 the result is that of `a` alone, missing gradients included: to an
    optimizer with weight decay a gradient of zeros is not the same as none.
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
    """Mean of the gradients over ranks, in place. DTensors come back as they are: FSDP2 has reduced them already.

    A parameter that only some ranks reached counts as zero on the others. Ranks agree on that before they exchange
    gradients, or they would wait for each other forever.
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
    """The same gradients, each alone in its memory: autograd may return one tensor, or views of it, for several."""
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
    """This rank's part of a gradient, flat, in `at_least` this precision, block by block."""
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
    """The scalars of each kind as one float64 tensor, by one transfer for all: each would wait for the device."""
    scalars = [scalar for kind in kinds for scalar in kind.values]
    values = torch.stack([s.to(scalars[0].device) for s in scalars]).cpu().double()
    return tuple(values.split([len(kind.values) for kind in kinds]))


def _average_bucket(bucket: list[Tensor], world: int, group: dist.ProcessGroup | None) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():  # no copy: it may be an embedding table of gigabytes
        dist.all_reduce(bucket[0], group=group)
        bucket[0].div_(world)
        return
    flat = torch.cat([g.reshape(-1) for g in bucket])
    dist.all_reduce(flat, group=group)
    flat.div_(world)
    for g, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
        g.copy_(mean.view_as(g))


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Runs of gradients of one dtype and device, each about `_BUCKET_BYTES` large."""
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
