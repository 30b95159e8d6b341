"""Diffusion Policy: a U-Net that predicts the noise in a trajectory. It reads no instruction."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, override

import numpy as np
import torch
from lerobot.utils.constants import ACTION, OBS_IMAGES
from torch import Tensor, nn

from lerobot_craft.core import TokenSpans
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies.adapter import (
    Batch,
    Demonstration,
    Fixed,
    Layer,
    Output,
    PolicyAdapter,
    Tokens,
    normal,
)
from lerobot_craft.policies.taps import outputs_of, valid_everywhere

UNET = "unet"


class DiffusionAdapter(PolicyAdapter):
    """Backbone: one layer, the image encoder; its tokens are (camera, observation step). Stack `unet`: its middle.

    The state enters the U-Net directly, so it has no hidden state to retain. In eval mode images are center-cropped.
    """

    policy_type = "diffusion"
    output_kind = "noise"
    reads_instruction = False
    train_mode = False
    fixed_names = ("noisy_actions", "timestep")
    readout = ("diffusion.unet.final_conv",)  # the up path is not held either, but is half of the U-Net

    @override
    def stacks(self, policy: Any) -> dict[str, int]:
        return {"": 1, UNET: len(policy.diffusion.unet.mid_modules)}

    @override
    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        unet = [layer for layer in layers if layer.stack == UNET]
        with ExitStack() as stack:
            middle = {x: stack.enter_context(outputs_of(policy.diffusion.unet.mid_modules[x.index])) for x in unet}
            encoders = _image_encoders(policy) if len(unet) < len(layers) else []
            images = [stack.enter_context(outputs_of(encoder)) for encoder in encoders]
            if not unet:
                policy.diffusion._prepare_global_conditioning(_model_batch(policy, batch))
            elif fixed is None:
                raise CraftError("layers of the U-Net depend on the noisy actions: give them and their timestep")
            else:
                self.output(policy, batch, fixed)
        tokens = {}
        for layer in layers:
            if layer.stack == UNET:
                hidden = middle[layer][0].transpose(1, 2)  # [B, C, T] -> [B, T, C]
                spans = TokenSpans(action=(0, hidden.shape[1]))
            else:
                hidden, spans = _image_tokens(policy, [output[0] for output in images])
            tokens[layer] = Tokens(hidden, valid_everywhere(hidden), spans)
        return tokens

    @override
    @torch.no_grad()
    def fix(self, policy: Any, batch: Batch, rngs: Sequence[np.random.Generator], draws: int = 1) -> list[Fixed]:
        actions = batch[ACTION]
        scheduler = policy.diffusion.noise_scheduler
        fixed = []
        for _ in range(draws):
            noise = normal(rngs, actions.shape[1:], actions.device)
            steps = [int(rng.integers(scheduler.config.num_train_timesteps)) for rng in rngs]
            timestep = torch.tensor(steps, dtype=torch.long, device=actions.device)
            noisy = scheduler.add_noise(actions.to(torch.float32), noise, timestep)
            fixed.append({"noisy_actions": noisy.to(torch.float16), "timestep": timestep})
        return fixed

    @override
    def output(self, policy: Any, batch: Batch, fixed: Fixed) -> Output:
        conditioning = policy.diffusion._prepare_global_conditioning(_model_batch(policy, batch))
        predicted = policy.diffusion.unet(fixed["noisy_actions"].float(), fixed["timestep"], global_cond=conditioning)
        return Output(predicted, valid_everywhere(predicted))

    @override
    def demonstration(self, policy: Any, batch: Batch, fixed: Fixed) -> Demonstration:
        actions = batch[ACTION]
        if policy.config.prediction_type == "epsilon":
            kept = policy.diffusion.noise_scheduler.alphas_cumprod.to(actions.device)[fixed["timestep"]][:, None, None]
            target = (fixed["noisy_actions"].float() - kept.sqrt() * actions) / (
                1 - kept
            ).sqrt()  # add_noise, solved for noise
        else:
            target = actions
        return Demonstration(target, ~batch["action_is_pad"].to(torch.bool), fixed)

    @override
    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> Iterable[str]:
        if layers is None:
            return ["diffusion"]
        middle = [layer.index for layer in layers if layer.stack == UNET]
        if not middle:
            return ["diffusion.rgb_encoder"]
        before = ["diffusion.rgb_encoder", "diffusion.unet.diffusion_step_encoder", "diffusion.unet.down_modules"]
        return [*before, *(f"diffusion.unet.mid_modules.{i}" for i in range(max(middle) + 1))]


def _model_batch(policy: Any, batch: Batch) -> dict[str, Any]:
    prepared = dict(batch)
    if policy.config.image_features:
        images = [batch[key] for key in policy.config.image_features]
        images = [image.unsqueeze(1) if image.ndim == 4 else image for image in images]
        prepared[OBS_IMAGES] = torch.stack(images, dim=-4)  # [B, steps, cameras, C, H, W]
    return prepared


def _image_encoders(policy: Any) -> list[nn.Module]:
    if not policy.config.image_features:
        raise CraftError(
            "this diffusion policy has no cameras, so it has no learned features of its observations: "
            f"use {setting('retention_mode')}=action, or {setting('layers_to_save')}=unet:-1"
        )
    encoder = policy.diffusion.rgb_encoder
    return list(encoder) if isinstance(encoder, nn.ModuleList) else [encoder]


def _image_tokens(policy: Any, outputs: list[Tensor]) -> tuple[Tensor, TokenSpans]:
    """Outputs of the encoder(s) -> [B, cameras * steps, D], camera by camera."""
    cameras, steps = len(policy.config.image_features), policy.config.n_obs_steps
    if len(outputs) == 1:  # one encoder for (batch, step, camera)
        hidden = outputs[0].reshape(-1, steps, cameras, outputs[0].shape[-1]).transpose(1, 2)
    else:  # one encoder per camera for (batch, step)
        hidden = torch.stack([output.reshape(-1, steps, output.shape[-1]) for output in outputs], dim=1)
    spans = TokenSpans(image=tuple((camera * steps, (camera + 1) * steps) for camera in range(cameras)))
    return hidden.flatten(1, 2), spans
