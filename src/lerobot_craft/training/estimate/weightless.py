"""Modules and batches that have every size and no memory, and what stands in for the values that they lack.

An estimate asks for sizes only. If code reads a value, it gets the one that makes memory largest: every position of a
mask is real, every comparison with the cache agrees, and a loss that is read for the log is not a number. A decision on
a value that has no stand-in is an error, and the estimate says `unknown`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.input_shapes import Shape

_aten = torch.ops.aten


def without_memory() -> FakeTensorMode:
    """The mode in which tensors on the CPU have no memory, and operations on them do no work."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def give_tensors(module: nn.Module) -> None:
    """Within `without_memory`: put every tensor of a module that is on the meta device onto the CPU, ties included.

    On the CPU because meta tensors know no autocast and no choice of attention kernel.
    """
    replaced: dict[int, Tensor] = {}

    def on_cpu(tensor: Tensor) -> Tensor:
        if id(tensor) not in replaced:
            moved = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            replaced[id(tensor)] = (
                nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
            )
        return replaced[id(tensor)]

    for part in module.modules():
        for tensors in (part._parameters, part._buffers, vars(part)):
            for name, value in tensors.items():
                if isinstance(value, Tensor):
                    tensors[name] = on_cpu(value)  # type: ignore[assignment]


def make_batch(shapes: Mapping[str, Shape], rows: int) -> dict[str, Any]:
    """Within `without_memory`: a batch as the preprocessor would return it."""
    return {name: torch.zeros((rows, *shape.size), dtype=shape.dtype) for name, shape in shapes.items()}


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


def run_without_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
