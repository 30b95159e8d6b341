"""Asking the teacher while its student is trained: no gradients, the mode of anchors, the precision of training."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lerobot_craft.anchors.columns import Columns
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.anchors.teacher_values import teacher_columns
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.policies import PolicyConfig, autocast
from lerobot_craft.lerobot_api.processors import Processor, policy_batch
from lerobot_craft.policies import Batch, PolicyAdapter, mode


def policy_inputs(raw: RawBatch, preprocessor: Processor) -> Batch:
    """What the policy sees of raw anchors, whose images are uint8."""
    cameras = [name for name, value in raw.items() if isinstance(value, Tensor) and value.dtype == torch.uint8]
    return policy_batch(raw, cameras, preprocessor)


def ask(
    adapter: PolicyAdapter,
    policy: Any,
    config: PolicyConfig,
    batch: Batch,
    retained: Retained,
    rngs: Sequence[np.random.Generator],
) -> Columns:
    """What the policy makes of a batch, as rows of a cache; noise and time of row i come from `rngs[i]`."""
    with torch.no_grad(), mode(policy, train=adapter.train_mode), autocast(config):
        return teacher_columns(adapter, policy, batch, retained, rngs)


@contextmanager
def adapter_off(policy: nn.Module) -> Iterator[None]:
    """The policy before fine-tuning, within the context: its PEFT adapter is switched off, if it has one."""
    switch = getattr(policy, "disable_adapter", None)
    if switch is None:
        yield
        return
    # PEFT freezes adapters as it switches them off, and then makes all of them trainable, also those that were not.
    trained = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        with switch():
            yield
    finally:
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def visit_generators(seed: int, visit: int | None, rows: Sequence[int]) -> list[np.random.Generator]:
    """One random generator per row of a visit, or (None) of what is measured outside of any visit."""
    # numpy takes (seed, 1) and (seed, 1, 0) for the same seed, so no last number is 0.
    return [np.random.default_rng((seed, 0 if visit is None else visit + 1, row + 1)) for row in rows]
