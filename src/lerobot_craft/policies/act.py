"""ACT: a transformer that regresses a chunk of actions from cameras and state. It reads no instruction."""

from collections.abc import Iterable, Sequence
from typing import Any, override

import numpy as np
import torch
from lerobot.utils.constants import ACTION, OBS_IMAGES
from torch import Tensor, nn

from lerobot_craft.core import TokenSpans
from lerobot_craft.policies.adapter import Batch, Demonstration, Fixed, Layer, Output, PolicyAdapter, Tokens
from lerobot_craft.policies.taps import outputs_of, taps, valid_everywhere

DECODER = "decoder"


class ACTAdapter(PolicyAdapter):
    """Backbone: the encoder, over a latent token, state, environment state and image pixels. Stack `decoder`: actions.

    Anchors run in eval mode: the latent is then zero, as when the policy acts, and dropout is off.
    """

    policy_type = "act"
    output_kind = "actions"
    reads_instruction = False
    train_mode = False
    fixed_names = ()
    readout = ("model.decoder.norm", "model.action_head")

    @override
    def stacks(self, policy: Any) -> dict[str, int]:
        return {"": len(policy.model.encoder.layers), DECODER: len(policy.model.decoder.layers)}

    @override
    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        points = {layer: _module_after(policy.model, layer) for layer in layers}
        with _feature_maps(policy) as maps, taps(points, stop=True) as seen:
            policy.model(_model_batch(policy, batch))
        tokens = {}
        for layer in layers:
            hidden = seen[layer].transpose(0, 1)  # lerobot's layers are sequence-first
            spans = TokenSpans(action=(0, hidden.shape[1])) if layer.stack == DECODER else _encoder_spans(policy, maps)
            tokens[layer] = Tokens(hidden, valid_everywhere(hidden), spans)
        return tokens

    @override
    def fix(self, policy: Any, batch: Batch, rngs: Sequence[np.random.Generator], draws: int = 1) -> list[Fixed]:
        return [{} for _ in range(draws)]  # nothing is random in eval mode

    @override
    def output(self, policy: Any, batch: Batch, fixed: Fixed) -> Output:
        actions = policy.model(_model_batch(policy, batch))[0]
        return Output(actions, valid_everywhere(actions))

    @override
    def demonstration(self, policy: Any, batch: Batch, fixed: Fixed) -> Demonstration:
        return Demonstration(batch[ACTION], ~batch["action_is_pad"].to(torch.bool), fixed)

    @override
    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> Iterable[str]:
        inputs = [
            f"model.{name}"
            for name in (
                "backbone",
                "encoder_latent_input_proj",
                "encoder_robot_state_input_proj",
                "encoder_env_state_input_proj",
                "encoder_img_feat_input_proj",
                "encoder_1d_feature_pos_embed",
            )
        ]
        if layers is None:
            return [*inputs, "model.encoder", "model.decoder", "model.decoder_pos_embed", "model.action_head"]
        decoder = [layer.index for layer in layers if layer.stack == DECODER]
        if decoder:
            chosen = [f"model.decoder.layers.{i}" for i in range(max(decoder) + 1)]
            return [*inputs, "model.encoder", "model.decoder_pos_embed", *chosen]
        return [*inputs, *(f"model.encoder.layers.{i}" for i in range(max(x.index for x in layers) + 1))]

    @override
    def reached_parameters(self, policy: Any, layers: Sequence[Layer] | None) -> list[str]:
        multiplied_by_zero = _multiplied_by_zero(policy)
        return [name for name in super().reached_parameters(policy, layers) if name not in multiplied_by_zero]


def _model_batch(policy: Any, batch: Batch) -> dict[str, Any]:
    prepared = {key: value for key, value in batch.items() if key != ACTION}
    if policy.config.image_features:
        prepared[OBS_IMAGES] = [batch[key] for key in policy.config.image_features]
    return prepared


def _multiplied_by_zero(policy: Any) -> set[str]:
    """Weights on the path whose values never matter: the latent is zero, and the first decoder layer starts from zeros.

    That layer's self-attention averages identical vectors, so its queries and keys do not matter either.
    """
    first = "model.decoder.layers.0"
    of_decoder = f"{first}.norm1.weight" if policy.config.pre_norm else f"{first}.self_attn.in_proj_weight"
    return {"model.encoder_latent_input_proj.weight", of_decoder}


def _module_after(model: Any, layer: Layer) -> nn.Module:
    stack = model.decoder if layer.stack == DECODER else model.encoder
    after: list[nn.Module] = [*stack.layers[1:], stack.norm]
    return after[layer.index]


def _feature_maps(policy: Any) -> Any:
    """[B, D, h, w] per camera; empty for a policy without cameras."""
    return outputs_of(policy.model.encoder_img_feat_input_proj if policy.config.image_features else nn.Identity())


def _encoder_spans(policy: Any, maps: list[Tensor]) -> TokenSpans:
    state = (1, 2) if policy.config.robot_state_feature else None  # after the latent
    start = 1 + bool(policy.config.robot_state_feature) + bool(policy.config.env_state_feature)
    image = []
    for feature_map in maps:
        pixels = feature_map.shape[-2] * feature_map.shape[-1]
        image.append((start, start + pixels))
        start += pixels
    return TokenSpans(image=tuple(image), state=state)
