"""The one rule about precision: nothing is subtracted, squared or summed in less than float32."""

import torch
from torch import Tensor


def widen(x: Tensor) -> Tensor:
    """`x` in float32, or in its own dtype where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
