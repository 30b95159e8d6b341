"""Precision: subtract, square and sum in at least float32, and never mistake rounding for signal."""

from collections.abc import Iterable

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or in its own dtype if that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# Sums of many terms round more than once. Measured on the tiny policies, |retention gradient| / |task gradient|: up to
# 0.8 roundings of the dtype while student equals teacher, at least 1e-2 after the first step.
_ROUNDINGS = 4.0


def rounding_of(dtype: torch.dtype) -> float:
    """The largest relative difference between two values that rounding alone can cause."""
    return _ROUNDINGS * torch.finfo(dtype).eps


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The floating dtype that rounds most; float32 if there is no floating dtype."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
