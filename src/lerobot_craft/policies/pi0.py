"""pi0: PaliGemma and a Gemma action expert with joint attention, trained by flow matching; and pi05.

pi05: pi0 with the state written into the prompt and the time fed to the expert's norms.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, override

import torch
from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d
from torch import Tensor

from lerobot_craft.core import TokenSpans
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies.adapter import Batch, Fixed, Layer, Tokens
from lerobot_craft.policies.flow import FlowAdapter
from lerobot_craft.policies.paligemma import (
    BACKBONE,
    PrefixLayout,
    decoder_taps,
    deepest,
    language_model,
    language_of,
    paligemma_embedder,
    prefix_reach,
)
from lerobot_craft.policies.taps import ImageEmbedder, eager_attention, taps, valid_everywhere

EXPERT = "expert"
_DECODER = f"{BACKBONE}.model.language_model"
_EXPERT_DECODER = "model.paligemma_with_expert.gemma_expert.model"


class PI0Adapter(FlowAdapter):
    """Backbone: images and language. Stack `expert`: the state token, then the noisy action tokens."""

    policy_type = "pi0"
    readout = (f"{_EXPERT_DECODER}.norm", "model.action_out_proj")
    input_projections: ClassVar[tuple[str, ...]] = (
        "state_proj",
        "action_in_proj",
        "action_time_mlp_in",
        "action_time_mlp_out",
    )
    state_tokens = 1

    @override
    def stacks(self, policy: Any) -> dict[str, int]:
        return {"": len(language_model(policy).layers), EXPERT: len(_expert(policy).layers)}

    @override
    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        backbone = [layer for layer in layers if layer.stack != EXPERT]
        expert = [layer for layer in layers if layer.stack == EXPERT]
        layout = PrefixLayout(policy, batch)
        points = decoder_taps(language_model(policy), backbone) | decoder_taps(_expert(policy), expert)
        if expert:
            if fixed is None:
                raise CraftError("layers of the action expert depend on the noisy action: give x_t and time")
            with layout.counting(), taps(points) as seen:
                self.run(policy, batch, fixed)
        else:
            with taps(points, stop=True) as seen:
                self._run_prefix(policy, layout)
        found = {layer: Tokens(seen[layer], layout.mask, layout.spans) for layer in backbone}
        for layer in expert:
            found[layer] = self._expert_tokens(policy, seen[layer])
        return {layer: found[layer] for layer in layers}

    @override
    def run(self, policy: Any, batch: Batch, fixed: Fixed) -> None:
        images, image_masks = policy._preprocess_images(batch)
        x_t = fixed["x_t"].float()
        # Noise and actions are both x_t, so that the model's own mixture is x_t at any time.
        policy.model.forward(
            images, image_masks, *language_of(batch), *self.state_of(policy, batch), x_t, x_t, fixed["time"]
        )

    @override
    def image_embedder(self, policy: Any) -> ImageEmbedder:
        return paligemma_embedder(policy)

    def state_of(self, policy: Any, batch: Batch) -> tuple[Tensor, ...]:
        """The state, if the model takes it as a separate argument."""
        return (policy.prepare_state(batch),)

    @override
    def own_actions(self, policy: Any, batch: Batch, noise: Tensor) -> Tensor:
        with eager_attention(language_model(policy).config, _expert(policy).config):
            return super().own_actions(policy, batch, noise)

    @override
    def time_distribution(self, policy: Any) -> tuple[float, float, float, float]:
        c = policy.config
        return c.time_sampling_beta_alpha, c.time_sampling_beta_beta, c.time_sampling_scale, c.time_sampling_offset

    @override
    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> Iterable[str]:
        if layers is not None and all(layer.stack != EXPERT for layer in layers):
            return prefix_reach(deepest(layers))
        projections = [f"model.{name}" for name in self.input_projections]
        if layers is None:
            last = self.stacks(policy)[EXPERT] - 1
            return [*self._joint_reach(last), *projections, f"{_EXPERT_DECODER}.norm", "model.action_out_proj"]
        last = deepest([layer for layer in layers if layer.stack == EXPERT])
        backbone = [layer for layer in layers if layer.stack != EXPERT]
        return [*self._joint_reach(last), *projections, *(prefix_reach(deepest(backbone)) if backbone else [])]

    @override
    def masks_missing_cameras(self, policy: Any) -> bool:
        return True

    @override
    def how_to_reach(self, policy: Any) -> str:
        return (
            f"prefix features never depend on the action expert. Use {setting('retention_mode')}=action (or layers of "
            f"the expert, {setting('layers_to_save')}=expert:-1), or train the backbone: "
            "--policy.train_expert_only=false; with --peft, "
            "--peft.target_modules='.*language_model.*self_attn\\.(q|v)_proj'"
        )

    def _run_prefix(self, policy: Any, layout: PrefixLayout) -> None:
        with layout.counting():
            embedded, mask, attention = policy.model.embed_prefix(
                layout.images, layout.image_masks, layout.tokens, layout.language_mask
            )
        with eager_attention(language_model(policy).config):
            policy.model.paligemma_with_expert.forward(
                attention_mask=prepare_attention_masks_4d(make_att_2d_masks(mask, attention)),
                position_ids=torch.cumsum(mask, dim=1) - 1,
                inputs_embeds=[embedded.to(language_model(policy).layers[0].self_attn.q_proj.weight.dtype), None],
                use_cache=False,
            )

    def _expert_tokens(self, policy: Any, hidden: Tensor) -> Tokens:
        actions = (self.state_tokens, self.state_tokens + policy.config.chunk_size)
        spans = TokenSpans(state=(0, self.state_tokens) if self.state_tokens else None, action=actions)
        return Tokens(hidden, valid_everywhere(hidden), spans)

    def _joint_reach(self, last_expert_layer: int) -> list[str]:
        # The expert reads the backbone only through keys and values, so nothing else of the last layer matters.
        shared = f"{_DECODER}.layers.{last_expert_layer}"
        return [
            *prefix_reach(last_expert_layer - 1),
            *(f"{shared}.{part}" for part in ("input_layernorm", "self_attn.k_proj", "self_attn.v_proj")),
            *(f"{_EXPERT_DECODER}.layers.{i}" for i in range(last_expert_layer + 1)),
        ]


def _expert(policy: Any) -> Any:
    return policy.model.paligemma_with_expert.gemma_expert.model


class PI05Adapter(PI0Adapter):
    """Backbone: images and language (with the state). Stack `expert`: the noisy action tokens."""

    policy_type = "pi05"
    input_projections = ("action_in_proj", "time_mlp_in", "time_mlp_out")
    state_tokens = 0

    @override
    def state_of(self, policy: Any, batch: Batch) -> tuple[Tensor, ...]:
        return ()
