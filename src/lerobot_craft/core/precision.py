"""Precision: nothing is subtracted, squared or summed in less than float32, and rounding is not taken for a signal."""

from collections.abc import Iterable

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# A sum of many terms rounds more than once. Length of the retention gradient relative to the task's, on the tiny
# policies: up to 0.8 of the dtype's own rounding where the student is its teacher, 1e-2 and more after the first step.
_ROUNDINGS = 4.0


def rounding_of(dtype: torch.dtype) -> float:
    """Relative to the values that two numbers were computed from, the difference that rounding alone can make."""
    return _ROUNDINGS * torch.finfo(dtype).eps


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The floating dtype that rounds most; float32 where there is none."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
