"""pi0_fast: a PaliGemma that reads images and a prompt (including the state) and writes FAST action tokens."""

from collections.abc import Iterable, Sequence
from typing import Any, override

import numpy as np
import torch
from lerobot.policies.common.vla_utils import prepare_attention_masks_4d
from lerobot.utils.constants import ACTION_TOKEN_MASK, ACTION_TOKENS
from torch import Tensor

from lerobot_craft.policies.adapter import Batch, Demonstration, Fixed, Layer, Output, PolicyAdapter, Tokens
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
from lerobot_craft.policies.taps import ImageEmbedder, mode, taps


class PI0FastAdapter(PolicyAdapter):
    """Output: logits of the next FAST token after the teacher's own tokens."""

    policy_type = "pi0_fast"
    output_kind = "logits"
    reads_instruction = True
    train_mode = True
    fixed_names = ("tokens", "token_mask")
    readout = (f"{BACKBONE}.model.language_model.norm", f"{BACKBONE}.lm_head")

    @override
    def image_embedder(self, policy: Any) -> ImageEmbedder:
        return paligemma_embedder(policy)

    @override
    def stacks(self, policy: Any) -> dict[str, int]:
        return {"": len(language_model(policy).layers)}

    @override
    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        # Images and language never attend to action tokens, so the prefix alone gives the same values as a full pass.
        layout = PrefixLayout(policy, batch)
        with layout.counting():
            embedded, mask, attention, *_ = policy.model.embed_prefix_fast(
                layout.images, layout.image_masks, layout.tokens, layout.language_mask
            )
        embedded = embedded.to(language_model(policy).layers[0].self_attn.q_proj.weight.dtype)
        with taps(decoder_taps(language_model(policy), layers), stop=True) as seen:
            policy.model.paligemma_with_expert.forward(
                attention_mask=prepare_attention_masks_4d(attention, dtype=embedded.dtype),
                position_ids=torch.cumsum(mask, dim=1) - 1,
                inputs_embeds=[embedded, None],
                use_cache=False,
            )
        return {layer: Tokens(seen[layer], mask, layout.spans) for layer in layers}

    @override
    @torch.no_grad()
    def fix(self, policy: Any, batch: Batch, rngs: Sequence[np.random.Generator], draws: int = 1) -> list[Fixed]:
        # Decoding is greedy, so all draws are equal.
        images, image_masks = policy._preprocess_images(batch)
        prompt, prompt_mask = language_of(batch)
        length = policy.config.max_action_tokens
        with mode(policy, train=False):  # with checkpointing, train mode refuses the key-value cache
            written = policy.model.sample_actions_fast_kv_cache(
                images, image_masks, prompt, prompt_mask, max_decoding_steps=length - 1, temperature=0.0
            )
        tokenizer = policy._paligemma_tokenizer
        start = torch.full_like(written[:, :1], tokenizer.bos_token_id)
        tokens = torch.cat([start, written], dim=1)  # [B, length]
        mask = _until_first(tokens == tokenizer.convert_tokens_to_ids("|"))
        return [{"tokens": tokens.masked_fill(~mask, 0), "token_mask": mask}] * draws

    @override
    def output(self, policy: Any, batch: Batch, fixed: Fixed) -> Output:
        tokens, mask = fixed["tokens"], fixed["token_mask"]
        images, image_masks = policy._preprocess_images(batch)
        lm_head = policy.model.paligemma_with_expert.paligemma.lm_head
        with taps({"read": lm_head}, stop=True) as seen:  # skip the loss on these tokens
            policy.model.forward(images, image_masks, *language_of(batch), tokens, mask)
        return Output(lm_head(seen["read"][:, :-1]), mask[:, 1:])  # position i predicts token i + 1

    @override
    def demonstration(self, policy: Any, batch: Batch, fixed: Fixed) -> Demonstration:
        if batch.get(ACTION_TOKENS) is None:
            return Demonstration(*self.token_labels(fixed), fixed)
        tokens, mask = batch[ACTION_TOKENS], batch[ACTION_TOKEN_MASK].to(torch.bool)
        return Demonstration(tokens[:, 1:], mask[:, 1:], {"tokens": tokens, "token_mask": mask})

    @override
    def token_labels(self, fixed: Fixed) -> tuple[Tensor, Tensor]:
        return fixed["tokens"][:, 1:], fixed["token_mask"][:, 1:]

    @override
    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> Iterable[str]:
        if layers is not None:
            return prefix_reach(deepest(layers))
        last = self.stacks(policy)[""] - 1
        return [*prefix_reach(last), f"{BACKBONE}.model.language_model.norm", f"{BACKBONE}.lm_head"]

    @override
    def masks_missing_cameras(self, policy: Any) -> bool:
        return True

    @override
    def how_to_reach(self, policy: Any) -> str:
        return (
            "with --peft, name target modules inside the language model: "
            "--peft.target_modules='.*language_model.*self_attn\\.(q|v)_proj'"
        )


def _until_first(end: Tensor) -> Tensor:
    """[B, L] -> True up to and including each row's first True, or everywhere if there is none."""
    return (end.cumsum(dim=1) - end.long()) == 0
