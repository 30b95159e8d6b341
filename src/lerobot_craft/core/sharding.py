"""Parameters spread over ranks (FSDP2) for modules whose parts are reached into, not only called.

`fully_shard` gathers parameters in hooks, and hooks run when a module is called. Two habits of robot policies pass them
by: the trainer calls `policy.forward(batch)`, and policies take apart their own layers (`layer.self_attn.q_proj(x)`)
instead of calling them. So the hooks of the whole hang on a root that runs any function of the module, and the parts
that are gathered on their own are the smallest ones with weights, such as a linear layer: these are always called.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

_UNITS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
_SMALLEST_UNIT = 2**12  # parameters; smaller ones (norms, biases) are gathered with the root


class _Root(nn.Module):
    """Where FSDP2's hooks of the whole hang: what runs here finds the parameters of no unit gathered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Sharded(nn.Module):
    """A module whose parameters are spread over the ranks of a mesh; each rank keeps its part of every one.

    The module itself stays the object that it was, with other parameters: DTensors in place of tensors.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        for unit in _units(module):
            fully_shard(unit, mesh=mesh)
        # The gathered small parameters stay from the forward to the backward.
        self.root = _Root(module)
        fully_shard(self.root, mesh=mesh, reshard_after_forward=False)
        _ROOTS[module] = self.root

    @property
    def module(self) -> nn.Module:
        """What was sharded."""
        return self.root.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward; also where it is called by this name, past the hooks of `__call__`."""
        return self.root(self.module.forward, *args, **kwargs)


_ROOTS: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def run_in[Result](module: nn.Module, function: Callable[[], Result]) -> Result:
    """Run a function that passes through (parts of) a module, sharded or not; its result must depend on nothing else.

    If the module is sharded, all ranks do this together, and the tensors in the result carry the hooks that make a
    backward possible.
    """
    root = _ROOTS.get(module)
    result: Result = function() if root is None else root(function)
    return result


def replace_parameters(optimizer: torch.optim.Optimizer, replacements: Mapping[Tensor, Tensor]) -> None:
    """Make an optimizer that has not stepped yet move other tensors, each with the settings of the one before it."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]


def whole(value: Any) -> Any:
    """A sharded tensor gathered; a collective. Anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor that belongs to a parameter (a moment, a master weight), spread as the parameter is."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    on_device = value.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that are gathered on their own: with weights of their own that nothing else reads."""
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    attentions = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
    # torch's own attention reads the weights of its parts without calling them.
    inside_attention = {id(part) for attention in attentions for part in attention.modules()}
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if not isinstance(part, _UNITS) or id(part) in inside_attention or any(holders[id(p)] > 1 for p in own):
            continue
        if sum(p.numel() for p in own) >= _SMALLEST_UNIT:
            yield part
