"""`pi0_fast_tiny`: lerobot's pi0_fast policy, built at the sizes its config names."""

from typing import Any

from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy, PI0FastPytorch
from lerobot.utils.constants import ACTION_TOKEN_MASK, ACTION_TOKENS
from torch import Tensor

from lerobot_craft.tiny.configuration_pi0_fast_tiny import PI0FastTinyConfig
from lerobot_craft.tiny.sizes import at_sizes
from lerobot_craft.tiny.swapping import swapped


class SmallNetwork(PI0FastPytorch):  # type: ignore[misc]
    """lerobot's network, which decodes from the prompt that it was trained on, and can leave out padding.

    lerobot 0.6.1 trains with <bos> as the first of the causal action tokens, which no word of the prompt sees, and
    decodes with <bos> as the last word of the prompt, which all the others see. A policy of billions of parameters gets
    over it; a small one acts on prompts that it has never met.
    """

    _decoding = False

    def forward(self, images: Any, img_masks: Any, tokens: Tensor, masks: Tensor, *actions: Any) -> Any:
        """lerobot's; without padding, up to the last word of the longest prompt."""
        if self.config.leave_out_padding:
            length = padded_to(masks)
            tokens, masks = tokens[:, :length], masks[:, :length]
        return super().forward(images, img_masks, tokens, masks, *actions)

    def sample_actions_fast(self, *args: Any, **kwargs: Any) -> Tensor:
        """Decode without a cache, as lerobot does."""
        return self._decode(super().sample_actions_fast, *args, **kwargs)

    def sample_actions_fast_kv_cache(self, *args: Any, **kwargs: Any) -> Tensor:
        """Decode with a cache of keys and values, as lerobot does."""
        return self._decode(super().sample_actions_fast_kv_cache, *args, **kwargs)

    def _decode(self, sample: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._decoding = True
        try:
            tokens: Tensor = sample(*args, **kwargs)
            return tokens
        finally:
            self._decoding = False

    def _create_custom_attention_mask_fast(self, segments: Any, pad_masks: Tensor, batch_size: int) -> Tensor:
        mask: Tensor = super()._create_custom_attention_mask_fast(segments, pad_masks, batch_size)
        if self._decoding:
            mask[:, :-1, -1] = False  # the last token is <bos>
        return mask


class PI0FastTinyPolicy(PI0FastPolicy):  # type: ignore[misc]
    """lerobot's `PI0FastPolicy` at other sizes; the loss is lerobot's, for padding and decoding see above."""

    config_class = PI0FastTinyConfig
    name = "pi0_fast_tiny"

    def __init__(self, config: PI0FastTinyConfig, **kwargs: Any) -> None:
        with (
            at_sizes(modeling_pi0_fast, config.sizes, config.image_resolution[0]),
            swapped(modeling_pi0_fast, {"PI0FastPytorch": SmallNetwork}),
        ):
            super().__init__(config, **kwargs)

    def forward(self, batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """lerobot's; without padding, up to the last action token of the longest chunk."""
        if self.config.leave_out_padding and batch.get(ACTION_TOKEN_MASK) is not None:
            length = padded_to(batch[ACTION_TOKEN_MASK])
            batch = {**batch, **{name: batch[name][:, :length] for name in (ACTION_TOKENS, ACTION_TOKEN_MASK)}}
        return super().forward(batch, *args, **kwargs)


def padded_to(mask: Tensor) -> int:
    """Length of the longest row of a mask [B, L] whose rows are True up to where padding begins; at least 1."""
    return max(1, len(mask.any(dim=0).nonzero()))
