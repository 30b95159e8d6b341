"""The order in which anchors are visited: a pure function of the seed and the step, so a resumed run continues it."""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Visit(NamedTuple):
    """The anchors of one rank at one step."""

    indices: Tensor  # int64 [B]
    passes: Tensor  # int64 [B]: how often all anchors of the same origin came before
    places: Tensor  # int64 [B]: each anchor's position in the step of all ranks together


def visit(
    origins: Sequence[Tensor],
    batch_size: int,
    seed: int,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    most: float | None = None,
) -> Visit:
    """Which anchors a rank takes at a step: the same number from each origin, however many anchors each has.

    Twenty old frames next to a thousand cross anchors fill half of every batch. `most` limits how often a few anchors
    are repeated, for policies to which every visit of an anchor is the same.

    The ranks split the step that one process with their combined batch would take, so the step does not depend on the
    number of ranks. Every rank gets a share of each origin that has enough slots for all ranks.

    Args:
        origins: Indices of the anchors of each origin.
        batch_size: Anchors of this rank.
        seed: Seed of the order.
        step: Anchor steps so far.
        rank: This process.
        world_size: Number of processes.
        most: Anchors of the rarer origin come at most `most` times as often, but once per step; None: no limit.
    """
    together = batch_size * world_size
    if together < len(origins):
        origins = [torch.cat(list(origins))]
    parts = []
    for anchors, share in zip(origins, _shares([len(anchors) for anchors in origins], together, most), strict=True):
        drawn = batch_indices(len(anchors), share, seed, step)
        passes = (step * share + torch.arange(share)) // len(anchors)
        parts.append((anchors[drawn], passes))
    indices, passes = (torch.cat(columns) for columns in zip(*parts, strict=True))
    places = torch.arange(rank, together, world_size)
    return Visit(indices[places], passes[places], places)


def _shares(sizes: Sequence[int], places: int, most: float | None) -> list[int]:
    """Slots of each origin in a step, at least one."""
    shares = [places // len(sizes) + (number < places % len(sizes)) for number in range(len(sizes))]
    if most is None or len(sizes) == 1:
        return shares
    rare = sizes.index(min(sizes))
    weight, others = most * sizes[rare], sizes[1 - rare]  # there are two origins
    shares[rare] = max(1, min(shares[rare], int(places * weight / (weight + others))))
    shares[1 - rare] = places - shares[rare]
    return shares


def by_origin(cross: Tensor) -> list[Tensor]:
    """Split anchors into old frames and cross anchors; empty groups are left out."""
    return [rows for kind in (False, True) if len(rows := (cross.bool() == kind).nonzero().squeeze(1))]


def without(origins: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """The same origins without the given anchors."""
    return [anchors[~torch.isin(anchors, rows)] for anchors in origins]


def batch_indices(
    num_anchors: int, batch_size: int, seed: int, step: int, rank: int = 0, world_size: int = 1
) -> Tensor:
    """Which anchors a rank takes at a step, int64 [batch_size].

    The stream of anchors is a sequence of permutations. Each step takes the next `batch_size * world_size` entries, and
    each rank a part of them. No anchor comes twice in a step unless there are fewer anchors than it needs.
    """
    if num_anchors < 1 or batch_size < 1 or step < 0 or not 0 <= rank < world_size:
        raise ValueError(f"no batch of {batch_size} from {num_anchors} anchors at {step=}, {rank=}, {world_size=}")
    global_batch = batch_size * world_size
    start = step * global_batch + rank * batch_size
    pieces, missing = [], batch_size
    while missing > 0:
        epoch, position = divmod(start, num_anchors)
        piece = _epoch_order(num_anchors, global_batch, seed, epoch)[position : position + missing]
        pieces.append(piece)
        start, missing = start + len(piece), missing - len(piece)
    return torch.cat(pieces)


def _permutation(num_anchors: int, seed: int, epoch: int) -> Tensor:
    # Hashed, so that neighboring seeds and epochs such as (1, 2) and (2, 1) are unrelated.
    digest = hashlib.sha256(f"anchors {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return torch.randperm(num_anchors, generator=generator)


@lru_cache(maxsize=4)
def _epoch_order(num_anchors: int, global_batch: int, seed: int, epoch: int) -> Tensor:
    """An epoch's permutation. Its head shares no anchor with the last epoch's tail in the same step."""
    if num_anchors < 2 * global_batch:
        # Too few anchors to separate head and tail. Repeating one permutation is safe within a step; start a new one
        # only where an epoch and a step start together.
        period = global_batch // math.gcd(num_anchors, global_batch)
        return _permutation(num_anchors, seed, epoch - epoch % period)
    order = _permutation(num_anchors, seed, epoch)
    in_tail = epoch * num_anchors % global_batch  # entries of the last epoch in the step that both share
    if in_tail == 0:
        return order
    head = global_batch - in_tail
    tail = _permutation(num_anchors, seed, epoch - 1)[num_anchors - in_tail :]
    clashes = torch.isin(order, tail)
    misplaced = clashes[:head].nonzero().squeeze(1)
    # With at least two steps of anchors, the first free places lie before this epoch's own tail. The tail stays as
    # drawn, so the next epoch need not know about these swaps.
    free = (~clashes[head:]).nonzero().squeeze(1)[: len(misplaced)] + head
    order[misplaced], order[free] = order[free], order[misplaced]
    return order
