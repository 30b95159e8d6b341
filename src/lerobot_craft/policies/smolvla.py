"""SmolVLA: a SmolVLM whose keys and values feed a smaller action expert, trained by flow matching."""

from collections.abc import Iterable, Sequence
from typing import Any, override

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks, pad_vector
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor

from lerobot_craft.core import TokenSpans
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies.adapter import Batch, Fixed, Layer, Tokens
from lerobot_craft.policies.flow import FlowAdapter
from lerobot_craft.policies.paligemma import decoder_taps, deepest, language_of
from lerobot_craft.policies.taps import ImageEmbedder, outputs_of, taps, token_count, valid_everywhere

EXPERT = "expert"
_VLM = "model.vlm_with_expert.vlm.model"
_LM_EXPERT = "model.vlm_with_expert.lm_expert"
_SPECIAL_TOKENS = (2, 1)  # before and after each image, if the config enables them


class SmolVLAAdapter(FlowAdapter):
    """Backbone: images, language, one state token. Stack `expert`: the noisy action tokens."""

    policy_type = "smolvla"
    state_inputs = ("model.state_proj",)  # images and words do not attend to the state
    readout = (f"{_LM_EXPERT}.norm", "model.action_out_proj")

    @override
    def stacks(self, policy: Any) -> dict[str, int]:
        model = policy.model.vlm_with_expert
        return {"": model.num_vlm_layers, EXPERT: model.num_expert_layers}

    @override
    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        model = policy.model.vlm_with_expert
        backbone = [layer for layer in layers if layer.stack != EXPERT]
        expert = [layer for layer in layers if layer.stack == EXPERT]
        points = decoder_taps(_text_model(policy), backbone) | decoder_taps(model.lm_expert, expert)
        if expert and fixed is None:
            raise CraftError("layers of the action expert depend on the noisy action: give x_t and time")
        with outputs_of(model.get_vlm_model().connector) as image_tokens, taps(points, stop=not expert) as seen:
            if expert and fixed is not None:
                self.run(policy, batch, fixed)
            else:
                self._run_prefix(policy, batch)
        mask, spans = self._layout(policy, batch, token_count(image_tokens), policy.model.prefix_length)
        found = {layer: Tokens(seen[layer], mask, spans) for layer in backbone}
        for layer in expert:
            hidden = seen[layer]
            everywhere = valid_everywhere(hidden)
            found[layer] = Tokens(hidden, everywhere, TokenSpans(action=(0, hidden.shape[1])))
        return {layer: found[layer] for layer in layers}

    @override
    def run(self, policy: Any, batch: Batch, fixed: Fixed) -> None:
        images, image_masks = policy.prepare_images(batch)
        x_t = fixed["x_t"].float()
        # Noise and actions are both x_t, so that the model's own mixture is x_t at any time.
        policy.model.forward(
            images, image_masks, *language_of(batch), self._state(policy, batch), x_t, x_t, fixed["time"]
        )

    @override
    def image_embedder(self, policy: Any) -> ImageEmbedder:
        module = policy.model.vlm_with_expert
        vlm = module.get_vlm_model()
        return ImageEmbedder(module, (vlm.vision_model, vlm.connector))

    @override
    def own_actions(self, policy: Any, batch: Batch, noise: Tensor) -> Tensor:
        batch = {**batch, OBS_STATE: batch[OBS_STATE].clone()}  # lerobot converts ALOHA states in place
        actions = super().own_actions(policy, batch, noise)
        return policy._pi_aloha_encode_actions_inv(actions) if policy.config.adapt_to_pi_aloha else actions

    @override
    def demonstrated_actions(self, policy: Any, batch: Batch) -> Tensor:
        actions = batch[ACTION]
        if policy.config.adapt_to_pi_aloha:
            actions = policy._pi_aloha_encode_actions_inv(actions.clone())
        padded: Tensor = pad_vector(actions, policy.config.max_action_dim)
        return padded

    @override
    def time_distribution(self, policy: Any) -> tuple[float, float, float, float]:
        return 1.5, 1.0, 0.999, 0.001  # constants in VLAFlowMatching.sample_time

    @override
    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> Iterable[str]:
        if layers is not None and all(layer.stack != EXPERT for layer in layers):
            return self._prefix_reach(deepest(layers))
        inputs = ["model.action_in_proj", "model.action_time_mlp_in", "model.action_time_mlp_out"]
        if layers is None:
            last = self.stacks(policy)[EXPERT] - 1
            return [*self._joint_reach(policy, last), *inputs, f"{_LM_EXPERT}.norm", "model.action_out_proj"]
        last = deepest([layer for layer in layers if layer.stack == EXPERT])
        backbone = [layer for layer in layers if layer.stack != EXPERT]
        return [*self._joint_reach(policy, last), *inputs, *(self._prefix_reach(deepest(backbone)) if backbone else [])]

    @override
    def masks_missing_cameras(self, policy: Any) -> bool:
        return bool(policy.config.empty_cameras)

    @override
    def how_to_reach(self, policy: Any) -> str:
        return (
            f"prefix features never depend on the action expert. Use {setting('retention_mode')}=action (or layers of "
            f"the expert, {setting('layers_to_save')}=expert:-1), or train the backbone: "
            "--policy.train_expert_only=false; with --peft, "
            "--peft.target_modules='.*text_model.*self_attn\\.(q|v)_proj'"
        )

    def _run_prefix(self, policy: Any, batch: Batch) -> None:
        images, image_masks = policy.prepare_images(batch)
        embedded, mask, attention = policy.model.embed_prefix(
            images, image_masks, *language_of(batch), state=self._state(policy, batch)
        )
        policy.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, attention),
            position_ids=torch.cumsum(mask, dim=1) - 1,
            inputs_embeds=[embedded, None],
            use_cache=True,  # without it the cross-attention layers look for an expert
        )

    def _state(self, policy: Any, batch: Batch) -> Tensor:
        state = batch[OBS_STATE]
        if policy.config.adapt_to_pi_aloha:
            state = policy._pi_aloha_decode_state(state.clone())
        prepared: Tensor = policy.prepare_state({OBS_STATE: state})
        return prepared

    def _layout(
        self, policy: Any, batch: Batch, image_tokens: Sequence[int], prefix_length: int
    ) -> tuple[Tensor, TokenSpans]:
        _, image_masks = policy.prepare_images(batch)
        _, language_mask = language_of(batch)
        before, after = _SPECIAL_TOKENS if policy.model.add_image_special_tokens else (0, 0)
        image, parts, start = [], [], 0
        for camera, count in zip(image_masks, image_tokens, strict=True):
            image.append((start + before, start + before + count))
            parts += [
                language_mask.new_ones(len(camera), before),
                camera[:, None].to(language_mask.device).expand(-1, count),
                language_mask.new_ones(len(camera), after),
            ]
            start += before + count + after
        language = (start, start + language_mask.shape[1])
        state = (language[1], language[1] + 1)
        mask = torch.cat([*parts, language_mask, language_mask.new_ones(len(language_mask), 1)], dim=1)
        mask = torch.nn.functional.pad(mask, (0, max(0, prefix_length - mask.shape[1])), value=False)
        return mask, TokenSpans(image=tuple(image), language=language, state=state)

    def _prefix_reach(self, last_layer: int) -> list[str]:
        return [
            f"{_VLM}.vision_model",
            f"{_VLM}.connector",
            f"{_VLM}.text_model.embed_tokens",
            "model.state_proj",
            *(f"{_VLM}.text_model.layers.{i}" for i in range(last_layer + 1)),
        ]

    def _joint_reach(self, policy: Any, last_expert_layer: int) -> list[str]:
        # The expert reads the backbone only through keys and values, so nothing else of the last layer matters.
        per_expert_layer = policy.model.vlm_with_expert.num_vlm_layers // self.stacks(policy)[EXPERT]
        last_read = last_expert_layer * per_expert_layer
        shared = f"{_VLM}.text_model.layers.{last_read}"
        return [
            *self._prefix_reach(last_read - 1),
            *(f"{shared}.{part}" for part in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj")),
            *(f"{_LM_EXPERT}.layers.{i}" for i in range(last_expert_layer + 1)),
        ]


def _text_model(policy: Any) -> Any:
    return policy.model.vlm_with_expert.get_vlm_model().text_model
