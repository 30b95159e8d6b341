"""Modules and batches that have every size and no memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lerobot_craft.lerobot_api.input_shapes import Shape


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
