"""How parameters are held: sharded over ranks (FSDP2), or in bfloat16 with float32 copies.

`fully_shard` gathers parameters when a module is called. Robot policies often avoid that: `policy.forward(batch)`,
`layer.self_attn.q_proj(x)`. So the outermost hooks sit on a root module that runs any function of the policy. Below it,
only the smallest modules with weights, such as linear layers, are gathered separately.

bfloat16 has 8 significant bits, so a weight w does not change if an update is smaller than about 2^-9 |w|. Most
fine-tuning updates are. The copies accumulate them, and the weights are the rounded copies.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lerobot_craft.core.gradients import local_part

_UNITS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)
_SMALLEST_UNIT = 2**12  # parameters; smaller units (norms, biases) are gathered with the root


class _Root(nn.Module):
    """Carries FSDP2's outermost hooks. Units are not gathered yet when its function starts."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)


class Sharded(nn.Module):
    """A module whose parameters are sharded over a mesh.

    The module object stays the same; its parameters become DTensors.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        for unit in _units(module):
            fully_shard(unit, mesh=mesh)
        # The small parameters stay gathered between forward and backward.
        self.root = _Root(module)
        fully_shard(self.root, mesh=mesh, reshard_after_forward=False)
        _ROOTS[module] = self.root

    @property
    def module(self) -> nn.Module:
        """The sharded module."""
        return self.root.module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward. The hooks also run if this is called directly instead of through `__call__`."""
        return self.root(self.module.forward, *args, **kwargs)


_ROOTS: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()


def run_in[Result](module: nn.Module, function: Callable[[], Result]) -> Result:
    """Run a function that uses (parts of) a module, sharded or not. Its result may depend on no other parameters.

    If the module is sharded, all ranks must call this together. The result's tensors carry the hooks for backward.
    """
    root = _ROOTS.get(module)
    result: Result = function() if root is None else root(function)
    return result


def replace_parameters(optimizer: torch.optim.Optimizer, replacements: Mapping[Tensor, Tensor]) -> None:
    """Replace the tensors of an optimizer that has not stepped yet; each keeps its settings."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]


def whole(value: Any) -> Any:
    """Gather a sharded tensor (a collective). Other values are returned unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """Shard a full tensor that belongs to a parameter (a moment, a master weight) like the parameter."""
    if not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    on_device = value.to(parameter.device)
    return distribute_tensor(on_device, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    """Modules that are gathered separately: those with weights that no other module reads."""
    holders = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
    attentions = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
    # torch's own attention reads its parts' weights without calling the parts.
    inside_attention = {id(part) for attention in attentions for part in attention.modules()}
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        if not isinstance(part, _UNITS) or id(part) in inside_attention or any(holders[id(p)] > 1 for p in own):
            continue
        if sum(p.numel() for p in own) >= _SMALLEST_UNIT:
            yield part


class MasterWeights:
    """Master copies of an optimizer's bfloat16 parameters. The optimizer must not have stepped yet.

    Gradients arrive in the parameters' precision and are passed to the copies at each step. Moments are float32 too.

    Args:
        optimizer: Its parameters are replaced by the copies.
        parameters: The model's parameters by name; only those in the optimizer are used.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Iterable[tuple[str, Tensor]]) -> None:
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._parameters = {name: p for name, p in parameters if id(p) in trained and p.dtype == torch.bfloat16}
        self.copies: dict[str, Tensor] = {
            name: nn.Parameter(p.detach().float()) for name, p in self._parameters.items()
        }
        replace_parameters(optimizer, {p: self.copies[name] for name, p in self._parameters.items()})
        optimizer.register_step_pre_hook(self._hand_over)
        optimizer.register_step_post_hook(self._round)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's copies."""
        return sum(local_part(copy).nbytes for copy in self.copies.values())

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load full (unsharded) copies from a checkpoint, by name."""
        for name, copy in self.copies.items():
            copy.copy_(like(saved[name], copy))
            self._parameters[name].copy_(copy)

    def _hand_over(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in self._parameters.items():
            self.copies[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None  # freed at once, so that two full sets of gradients never exist

    @torch.no_grad()
    def _round(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.copies[name])
            self.copies[name].grad = None
