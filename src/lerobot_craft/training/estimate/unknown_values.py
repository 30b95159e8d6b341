"""What stands in for values that a tensor without memory does not have.

Sizes are all that an estimate asks for. Where code reads a value, the stand-in is the one that makes memory largest:
every position of a mask is real, every comparison with the cache agrees, and a loss that is read for the log is not a
number. A decision on a value that nothing can stand in for is an error, and the estimate says `unknown`.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lerobot_craft.errors import CraftError

_aten = torch.ops.aten


class UnknownValueError(CraftError):
    """The size of something depends on a value that is not there."""


class ReadsForTheLog(TorchFunctionMode):
    """Mode in which a tensor without values can be read as an array: every number is not a number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer what only reads values; everything else runs as it is."""
        reads = func in (torch.Tensor.numpy, torch.Tensor.tolist)
        if reads and isinstance(args[0], FakeTensor) and args[0].dtype.is_floating_point:
            values = np.full(tuple(args[0].shape), np.nan)
            return values.tolist() if func is torch.Tensor.tolist else values
        return func(*args, **(kwargs or {}))


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on tensors of which some have no values."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    if tensors and not any(isinstance(tensor, FakeTensor) for tensor in tensors) and not _on_meta(tensors):
        with unset_fake_temporarily():  # small real ones, such as lengths of rows, keep their values
            return func(*args, **kwargs)
    if func is _aten._local_scalar_dense.default:
        return _scalar(args[0])
    if func is _aten.equal.default:
        return True
    if func is _aten.nonzero.default:
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long)
    if func is _aten.index.Tensor:
        return func(args[0], [part for index in args[1] for part in _as_positions(index)], **kwargs)
    return func(*args, **kwargs)


def _scalar(tensor: Tensor) -> float:
    if tensor.dtype.is_floating_point:
        return float("nan")
    raise UnknownValueError("its forward pass decides by a value, and an estimate has none")


def _as_positions(index: Tensor | None) -> list[Tensor | None]:
    """A mask as the positions that it chooses, all of them; anything else as it is."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.long) for _ in range(index.dim())]


def _on_meta(tensors: list[Tensor]) -> bool:
    return any(tensor.is_meta for tensor in tensors)
