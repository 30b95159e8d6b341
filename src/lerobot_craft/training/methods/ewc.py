"""EWC: pull back the weights that the old tasks need most (Kirkpatrick et al., 2017)."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, override

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.demonstrations import Demonstrations, demonstration_loss, old_demonstrations
from lerobot_craft.training.methods.kept_tensors import keep, reopen
from lerobot_craft.training.methods.l2sp import PullToStart
from lerobot_craft.training.methods.method import Context, Cost, Knob, MethodParts

FISHER = "fisher.safetensors"
_FISHER = "Fisher information"

logger = logging.getLogger(__name__)


class EWC(PullToStart):
    """The task loss plus lambda/2 * sum_i F_i (theta_i - theta_0,i)^2, with lambda = `--craft.ewc_lambda`.

    F is the diagonal of the empirical Fisher information of the policy before fine-tuning:

        F_i = 1/N * sum_n (d loss_n / d theta_i)^2

    over N = `--craft.ewc_samples` frames of the old datasets, loss_n being lerobot's own loss on frame n alone. It is
    not normalised: so penalty / lambda has the unit of that loss, and estimates by how much the old demonstrations'
    loss has risen. Values of lambda are therefore not those of l2sp, and the log says how large F is.
    """

    name: ClassVar[str] = "ewc"
    label: ClassVar[str] = "EWC"
    held: ClassVar[str | None] = (
        "the weights near where they began, by their Fisher information on {ewc_samples} old frames "
        "(lambda {ewc_lambda:g})"
    )
    knob: ClassVar[Knob | None] = Knob("ewc_lambda", 100.0, (100.0, 1e3, 1e4, 1e5, 1e6))

    @classmethod
    @override
    def parts(cls, cfg: Any, config: CraftConfig, policy: nn.Module) -> MethodParts:
        plain = super().parts(cfg, config, policy)
        trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
        return replace(plain, kept={**plain.kept, _FISHER: torch.float32.itemsize * trained})

    @property
    @override
    def strength(self) -> float:
        return self.context.config.ewc_lambda

    @override
    def importance(self, trained: Mapping[str, Tensor]) -> list[Tensor]:
        context = self.context
        # Measured in float32 at least: squares of bfloat16 gradients would lose most of their digits.
        shapes = {name: torch.empty_like(p, dtype=_wide(p), device="meta") for name, p in trained.items()}
        if context.resumed:
            self._fisher_file = reopen(context, FISHER, shapes)
            return self._fisher_file.like(trained)
        frames = old_demonstrations(context, context.config.ewc_samples, "craft.ewc_samples")
        fisher = fisher_diagonal(context, frames)
        self._fisher_file = keep(context, FISHER, dict(zip(trained, fisher, strict=True)))
        return fisher

    @override
    def compute(self) -> str:
        return f"{super().compute()}, and before the first the gradients of {self.context.config.ewc_samples} frames"

    @override
    def costs(self) -> list[Cost]:
        return [*super().costs(), Cost(_FISHER, sum(tensor.nbytes for tensor in self._fisher or ()))]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fisher": self._fisher_file.sha256}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._fisher_file.require(state.get("fisher"))


def fisher_diagonal(context: Context, frames: Demonstrations) -> list[Tensor]:
    """Mean over frames of the squared gradient of each frame's loss, per trained parameter.

    Frames are dealt to ranks. Each has its own seed, so the result does not depend on how many ranks there are.
    """
    parameters, accelerator = context.trained, context.accelerator
    fisher = [torch.zeros_like(p, dtype=_wide(p), memory_format=torch.contiguous_format) for p in parameters]
    rank, world = accelerator.process_index, accelerator.num_processes
    numbers = range(rank, len(frames), world)
    progress = tqdm(numbers, desc="Fisher", unit="frame", disable=not accelerator.is_main_process)
    for number, raw in zip(progress, frames.batches(1, rank, world), strict=True):
        loss = demonstration_loss(context, raw, frames.cameras, seed=context.seed + number)
        for total, gradient in zip(fisher, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
            if gradient is not None:
                wide = gradient.to(total.dtype)
                total.addcmul_(wide, wide, value=1 / len(frames))
    fisher = [accelerator.reduce(total, reduction="sum") for total in fisher]
    if not all(torch.isfinite(total).all() for total in fisher):
        raise CraftError(
            "the gradients of the old demonstrations are not finite, so there is no Fisher information: check that "
            "--craft.old_dataset holds what the policy was trained on"
        )
    size = sum(total.numel() for total in fisher)
    mean, largest = sum(total.sum().item() for total in fisher) / size, max(total.max().item() for total in fisher)
    logger.info("Fisher information of %d old frames: mean %.3g, largest %.3g", len(frames), mean, largest)
    return fisher


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)
