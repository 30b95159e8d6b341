"""Float32 copies of bfloat16 weights, which the optimizer moves in their place.

bfloat16 has 8 significant bits: a weight w stays as it is where an update is smaller than about 2^-9 |w|, and at the
learning rates of fine-tuning most updates are. The copies collect them, and the weights are the copies, rounded.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lerobot_craft.core.gradients import local_part
from lerobot_craft.core.sharding import like, replace_parameters


class MasterWeights:
    """Of the bfloat16 parameters of an optimizer that has not stepped yet; its moments are then float32 too.

    Gradients come in the parameters' own precision. As the optimizer steps, they are handed to the copies.

    Args:
        optimizer: It gets the copies in the place of the parameters.
        parameters: By name, those that the optimizer moves among them.
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
        """Of this rank's copies."""
        return sum(local_part(copy).nbytes for copy in self.copies.values())

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Go on with whole copies of a checkpoint, by the same names."""
        for name, copy in self.copies.items():
            copy.copy_(like(saved[name], copy))
            self._parameters[name].copy_(copy)

    def _hand_over(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in self._parameters.items():
            self.copies[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None  # at once: never two gradients of everything

    @torch.no_grad()
    def _round(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self.copies[name])
            self.copies[name].grad = None
