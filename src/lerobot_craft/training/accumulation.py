"""A step of several micro-batches: `--craft.accumulate`. One gradient, in the memory of one micro-batch's activations.

A step's samples come as one batch on the host and are dealt out to its micro-batches as anchors are to ranks, so every
micro-batch has its share of what a method joined to the batch. Anchors are divided by the method itself.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lerobot_craft.core.gradients import loud
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.training.config import CraftConfig


def check_accumulation(cfg: Any, craft: CraftConfig) -> None:
    """Refuse what micro-batches cannot do, before anything slow happens.

    Raises:
        CraftError: It names the flag, and what to do instead.
    """
    if craft.accumulate == 1:
        return
    if not craft.enabled:
        raise CraftError(
            f"--craft.accumulate={craft.accumulate} needs --craft.enabled=true (--craft.method=naive is plain "
            "fine-tuning): without it this is lerobot-train, which takes a step after every batch"
        )
    if getattr(cfg, "sample_weighting", None) is not None:
        raise CraftError(
            "--sample_weighting makes the weights of a batch sum to its size, so micro-batches would not add up to one "
            "batch: leave it out, or leave out --craft.accumulate"
        )


def micro_batches(raw: RawBatch, number: int) -> list[RawBatch]:
    """The samples of a batch, dealt out; fewer micro-batches where there are not enough samples for each."""
    number = min(number, rows_of(raw))
    return [{name: values[first::number] for name, values in raw.items()} for first in range(number)]


def rows_of(raw: RawBatch) -> int:
    """Samples in a batch."""
    return next(len(values) for values in raw.values())


class AccumulatingPolicy:
    """Stands in for the policy in lerobot's update, whose one forward and backward thus become those of a whole step.

    Args:
        policy: As accelerate prepared it.
        accelerator: accelerate's.
        to_batch: From the samples of a micro-batch to what the policy sees.
    """

    def __init__(self, policy: nn.Module, accelerator: Any, to_batch: Callable[[RawBatch], dict[str, Any]]) -> None:
        self.policy = policy
        self._accelerator = accelerator
        self._to_batch = to_batch
        self.losses: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def forward(self, parts: list[RawBatch]) -> tuple[Tensor, dict[str, Any]]:
        """The mean loss over all samples, whose gradient is that of the last micro-batch: the rest is in `.grad`.

        Ranks exchange gradients in the backward pass of the last one.
        """
        total = sum(map(rows_of, parts))
        shares = [rows_of(part) / total for part in parts]
        sums: dict[str, Any] = {}
        before: Tensor | float = 0.0
        for part, share in zip(parts, shares, strict=True):
            last = part is parts[-1]
            with contextlib.nullcontext() if last else self._accelerator.no_sync(self.policy):
                loss, said = self.policy.forward(self._to_batch(part))
                self.losses.append(loss.detach())
                _add_numbers(sums, said or {}, share)
                if last:
                    return loss * share + before, sums
                with torch.autocast(self._accelerator.device.type, enabled=False):  # lerobot's update is within one
                    self._accelerator.backward(loud(loss * share))
                before = before + loss.detach() * share
        raise ValueError("a step needs at least one micro-batch")

    def first_not_finite(self) -> int | None:
        """Which micro-batch had a loss that is not finite."""
        return next((number for number, loss in enumerate(self.losses) if not loss.isfinite().all()), None)


def _add_numbers(sums: dict[str, Any], said: dict[str, Any], share: float) -> None:
    """Numbers that a policy says of a micro-batch, in the mean over samples; anything else as it was said last."""
    for name, value in said.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        sums[name] = sums.get(name, 0.0) + value * share if is_number else value
