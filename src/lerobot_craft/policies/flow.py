"""What pi0, pi05 and smolvla share: an action expert that predicts a velocity from a noisy action and a time.

x_t = t * noise + (1 - t) * actions, and the velocity's target is noise - actions. Teacher and student are compared at
the same stored (x_t, t). x_t is rounded to float16 before the policy sees it, so that float16 stores it exactly.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, override

import numpy as np
import torch
from lerobot.utils.constants import ACTION
from torch import Tensor

from lerobot_craft.policies.adapter import Batch, Demonstration, Fixed, Output, PolicyAdapter, normal
from lerobot_craft.policies.taps import ImageEmbedder, embedded_once, mode, outputs_of, valid_everywhere


class FlowAdapter(PolicyAdapter):
    """Output: the velocity at `x_t`, `time`, without padded action dimensions."""

    output_kind = "velocity"
    reads_instruction = True
    train_mode = True
    fixed_names = ("x_t", "time")

    @abstractmethod
    def run(self, policy: Any, batch: Batch, fixed: Fixed) -> None:
        """The policy's own training forward at `x_t`, `time`."""

    @override
    @abstractmethod
    def image_embedder(self, policy: Any) -> ImageEmbedder: ...

    @abstractmethod
    def time_distribution(self, policy: Any) -> tuple[float, float, float, float]:
        """alpha, beta, scale and offset of the Beta distribution of training times."""

    def own_actions(self, policy: Any, batch: Batch, noise: Tensor) -> Tensor:
        """The policy's own chunk from `noise`, in the model's scale: [B, H, action dimensions]."""
        with mode(policy, train=False):
            chunk: Tensor = policy.predict_action_chunk(dict(batch), noise=noise)
        return chunk

    def demonstrated_actions(self, policy: Any, batch: Batch) -> Tensor:
        """The demonstrator's chunk in the model's scale, padded: [B, H, max_action_dim]."""
        actions: Tensor = policy.prepare_action(batch)
        return actions

    @override
    @torch.no_grad()
    def fix(self, policy: Any, batch: Batch, rngs: Sequence[np.random.Generator], draws: int = 1) -> list[Fixed]:
        config = policy.config
        device = next(policy.parameters()).device
        shape = (config.chunk_size, config.max_action_dim)
        if batch.get(ACTION) is not None:
            actions = self.demonstrated_actions(policy, batch)
        else:  # no demonstration: add noise to the policy's own actions, as when sampling
            own = self.own_actions(policy, batch, normal(rngs, shape, device))
            actions = torch.nn.functional.pad(own, (0, config.max_action_dim - own.shape[-1]))
        alpha, beta, scale, offset = self.time_distribution(policy)
        fixed = []
        for _ in range(draws):
            noise = normal(rngs, shape, device)
            times = [rng.beta(alpha, beta) * scale + offset for rng in rngs]
            time = torch.tensor(times, dtype=torch.float32, device=device)
            x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * actions.to(torch.float32)
            fixed.append({"x_t": x_t.to(torch.float16), "time": time, "actions": actions})
        return fixed

    @override
    def output(self, policy: Any, batch: Batch, fixed: Fixed) -> Output:
        with outputs_of(policy.model.action_out_proj) as velocity:
            self.run(policy, batch, fixed)
        values = velocity[0][..., : policy.config.output_features[ACTION].shape[0]]
        return Output(values, valid_everywhere(values))

    @override
    def outputs(self, policy: Any, batch: Batch, draws: Sequence[Fixed]) -> list[Output]:
        with embedded_once(self.image_embedder(policy).module):
            return super().outputs(policy, batch, draws)

    @override
    def demonstration(self, policy: Any, batch: Batch, fixed: Fixed) -> Demonstration:
        actions = fixed["actions"]
        # noise - actions, from x_t = t * noise + (1 - t) * actions
        target = (fixed["x_t"].float() - actions) / fixed["time"][:, None, None]
        target = target[..., : policy.config.output_features[ACTION].shape[0]]
        padded = batch.get("action_is_pad")
        mask = valid_everywhere(target) if padded is None else ~padded.to(torch.bool)
        return Demonstration(target, mask, fixed)
