"""The order in which anchors are visited: a pure function of the seed and the step, so a resumed run continues it."""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Visit(NamedTuple):
    """The anchors that one rank takes at one step."""

    indices: Tensor  # int64 [B]
    passes: Tensor  # int64 [B]: how often all anchors of the same origin had come before
    places: Tensor  # int64 [B]: the place of each in the step as one process would take it


def visit(
    origins: Sequence[Tensor],
    batch_size: int,
    seed: int,
    step: int,
    rank: int = 0,
    world_size: int = 1,
    most: float | None = None,
) -> Visit:
    """Which anchors this rank takes at this step: as many of each origin, however many anchors each has.

    Twenty old frames beside a thousand cross anchors fill half of every batch; in one common permutation a batch of
    sixteen would hold one of them in three steps. Where each visit of an anchor is like the one before, `most` keeps a
    few of them from taking the place of many.

    The step is that of one process with the batches of all ranks, and the ranks deal it out among them, so that it is
    the same step however many share it. Each has its part of every origin that has a place for each.

    Args:
        origins: Indices of the anchors of each origin.
        batch_size: Anchors of this rank.
        seed: Of the order.
        step: Anchor steps so far.
        rank: This process.
        world_size: All processes.
        most: How many times as often as the others an anchor of the rarer origin may come, beyond the one place that
            it always has; None: however often.
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
    """Places of each origin in a step, at least one."""
    shares = [places // len(sizes) + (number < places % len(sizes)) for number in range(len(sizes))]
    if most is None or len(sizes) == 1:
        return shares
    rare = sizes.index(min(sizes))
    weight, others = most * sizes[rare], sizes[1 - rare]  # there are two origins
    shares[rare] = max(1, min(shares[rare], int(places * weight / (weight + others))))
    shares[1 - rare] = places - shares[rare]
    return shares


def by_origin(cross: Tensor) -> list[Tensor]:
    """Anchors of old frames, and those of new frames under old instructions: those of the two that there are."""
    return [rows for kind in (False, True) if len(rows := (cross.bool() == kind).nonzero().squeeze(1))]


def without(origins: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
    """The same origins, without some of their anchors."""
    return [anchors[~torch.isin(anchors, rows)] for anchors in origins]


def batch_indices(
    num_anchors: int, batch_size: int, seed: int, step: int, rank: int = 0, world_size: int = 1
) -> Tensor:
    """Which anchors this rank takes at this step, int64 [batch_size].

    The endless stream of anchors is one permutation after the other. A step takes the next `batch_size * world_size`
    of it, and each rank its part. Every anchor comes once per permutation, and no anchor comes twice in a step unless
    there are fewer anchors than a step takes.
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
    # Hashed, so that neighbouring seeds and epochs (1, 2) and (2, 1) have nothing in common.
    digest = hashlib.sha256(f"anchors {seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8]) >> 1)
    return torch.randperm(num_anchors, generator=generator)


@lru_cache(maxsize=4)
def _epoch_order(num_anchors: int, global_batch: int, seed: int, epoch: int) -> Tensor:
    """Permutation of one epoch whose head shares no anchor with the tail of the last one in the same step."""
    if num_anchors < 2 * global_batch:
        # Too few anchors to keep head and tail apart. One permutation over and over never repeats within a step
        # either, so a new one begins only where an epoch and a step begin together.
        period = global_batch // math.gcd(num_anchors, global_batch)
        return _permutation(num_anchors, seed, epoch - epoch % period)
    order = _permutation(num_anchors, seed, epoch)
    in_tail = epoch * num_anchors % global_batch  # entries of the last epoch in the step that we share with it
    if in_tail == 0:
        return order
    head = global_batch - in_tail
    tail = _permutation(num_anchors, seed, epoch - 1)[num_anchors - in_tail :]
    clashes = torch.isin(order, tail)
    misplaced = clashes[:head].nonzero().squeeze(1)
    # With two steps' worth of anchors the first free places lie before this epoch's own tail. The tail stays as drawn,
    # so the next epoch need not know how this one was mended.
    free = (~clashes[head:]).nonzero().squeeze(1)[: len(misplaced)] + head
    order[misplaced], order[free] = order[free], order[misplaced]
    return order
