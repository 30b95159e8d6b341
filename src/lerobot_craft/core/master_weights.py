"""Float32 copies of bfloat16 weights, which the optimizer updates instead.

bfloat16 has 8 significant bits, so a weight w does not change if an update is smaller than about 2^-9 |w|. Most
fine-tuning updates are. The copies accumulate them, and the weights are the rounded copies.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lerobot_craft.core.gradients import local_part
from lerobot_craft.core.sharding import like, replace_parameters


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
