"""A quadratic pull of the weights back to where training started: what l2sp and ewc share."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lerobot_craft.core.precision import widen
from lerobot_craft.errors import CraftError
from lerobot_craft.training.methods.method import Context

_SHARDING = {"FSDP", "DEEPSPEED", "MEGATRON_LM"}  # of accelerate's DistributedType


@torch.no_grad()
def add_pull(
    parameters: Sequence[nn.Parameter], start: Sequence[Tensor], strength: float, fisher: Sequence[Tensor] | None = None
) -> Tensor:
    """Add the gradient of P = strength/2 * sum_i F_i (theta_i - theta0_i)^2 to `.grad`, and return P (float64).

    Tensor by tensor: the only temporaries are of one parameter's size. A parameter that this step's loss did not reach
    and that has not moved keeps no gradient: to an optimizer with weight decay, zeros would not be the same.

    Args:
        parameters: theta, after the backward pass.
        start: theta0.
        strength: Of the pull.
        fisher: F; ones if None.
    """
    total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for i, (parameter, origin) in enumerate(zip(parameters, start, strict=True)):
        moved = widen(parameter) - widen(origin)
        pull = moved if fisher is None else moved * fisher[i]
        total += torch.dot(pull.flatten(), moved.flatten()).to(total.device)
        if parameter.grad is not None:
            parameter.grad.add_(pull, alpha=strength)
        elif moved.any():
            parameter.grad = pull.mul(strength).to(parameter.dtype)
    return total * (strength / 2)


def require_whole_parameters(context: Context) -> None:
    """Refuse to run where a process holds only parts of the parameters."""
    kind = context.accelerator.distributed_type
    if kind in _SHARDING:
        raise CraftError(
            f"--craft.method={context.config.method} needs whole parameters on every process: run it without "
            f"{kind.value}"
        )


def require_plain_gradients(context: Context) -> None:
    """Refuse to run where `.grad` is not the whole gradient of the loss."""
    require_whole_parameters(context)
    if context.accelerator.scaler is not None:
        raise CraftError(
            f"--craft.method={context.config.method} adds to the gradient, which float16 mixed precision scales: use "
            "bfloat16 or full precision"
        )
