"""L2-SP: pull every trained weight back to its value before fine-tuning (Li, Grandvalet and Davoine, 2018).

The pull, a quadratic one, is what it shares with ewc.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, override

import torch
from torch import Tensor, nn

from lerobot_craft.core.precision import widen
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.kept_tensors import keep_start, trained_parameters
from lerobot_craft.training.methods.method import Context, Cost, Knob, Method, MethodParts, Stopwatch

_START = "the weights before fine-tuning"


class PullToStart(Method):
    """Plain fine-tuning plus strength/2 * sum_i F_i (theta_i - theta0_i)^2.

    Its gradient joins the task's before the two are clipped together. theta0 is what the trained parameters were at
    step 0; with PEFT the adapters' own initial values.
    """

    needs_whole_parameters: ClassVar[bool] = True

    @classmethod
    @override
    def parts(cls, cfg: Any, config: CraftConfig, policy: nn.Module) -> MethodParts:
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        return MethodParts(cfg.batch_size, kept={_START: sum(parameter.nbytes for parameter in trained)})

    @override
    def start(self, context: Context) -> None:
        super().start(context)
        require_plain_gradients(context)
        trained = trained_parameters(context)
        self._fisher = self.importance(trained)
        self._kept = keep_start(context, trained)
        self._start = self._kept.like(trained) if context.resumed else [p.clone() for p in trained.values()]
        self._penalty: Tensor | None = None
        self._stopwatch = Stopwatch(context.accelerator.device)

    @property
    @abstractmethod
    def strength(self) -> float:
        """Of the pull."""

    def importance(self, trained: Mapping[str, Tensor]) -> list[Tensor] | None:
        """F, one tensor per trained parameter; None stands for ones."""
        return None

    @override
    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self._stopwatch.start()
        self._penalty = add_pull(self.context.trained, self._start, self.strength, self._fisher)
        self._stopwatch.stop()

    @override
    def metrics(self) -> dict[str, Any]:
        if self._penalty is None:
            return {}
        return {"penalty": self._penalty.item(), "retention_s": self._stopwatch.seconds}

    @override
    def compute(self) -> str:
        return "one pass over the trained weights per step"

    @override
    def costs(self) -> list[Cost]:
        return [Cost(_START, sum(tensor.nbytes for tensor in self._start))]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"start_weights": self._kept.sha256}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._kept.require(state.get("start_weights"))


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


def require_plain_gradients(context: Context) -> None:
    """Refuse to run where `.grad` is not the gradient of the loss."""
    if context.accelerator.scaler is not None:
        raise CraftError(
            f"--craft.method={context.config.method} adds to the gradient, which float16 mixed precision scales: use "
            "bfloat16 or full precision"
        )


class L2SP(PullToStart):
    """The task loss plus alpha/2 * |theta - theta_0|^2, with alpha = `--craft.l2sp_alpha`."""

    name: ClassVar[str] = "l2sp"
    label: ClassVar[str] = "L2-SP"
    held: ClassVar[str | None] = "the weights near where they began (alpha {l2sp_alpha:g})"
    knob: ClassVar[Knob | None] = Knob("l2sp_alpha", 0.01, (0.01, 0.1, 1.0, 10.0))

    @property
    @override
    def strength(self) -> float:
        return self.context.config.l2sp_alpha
