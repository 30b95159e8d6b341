"""What pi0, pi05 and pi0_fast share: a PaliGemma prefix of images and language with bidirectional attention."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lerobot.utils.constants import OBS_LANGUAGE_ATTENTION_MASK, OBS_LANGUAGE_TOKENS
from torch import Tensor, nn

from lerobot_craft.core import TokenSpans
from lerobot_craft.policies.adapter import Batch, Layer
from lerobot_craft.policies.taps import ImageEmbedder, outputs_of, token_count

BACKBONE = "model.paligemma_with_expert.paligemma"


def language_model(policy: Any) -> Any:
    """The decoder that reads images and language."""
    return policy.model.paligemma_with_expert.paligemma.model.language_model


def paligemma_embedder(policy: Any) -> ImageEmbedder:
    """What embeds images in pi0, pi05 and pi0_fast."""
    module = policy.model.paligemma_with_expert
    return ImageEmbedder(module, (module.paligemma.model.vision_tower, module.paligemma.model.multi_modal_projector))


def decoder_taps(decoder: Any, layers: Iterable[Layer]) -> dict[Layer, nn.Module]:
    """The module that receives each layer's output: the next layer's first norm, or the final norm."""
    norms = [layer.input_layernorm for layer in decoder.layers[1:]] + [decoder.norm]
    return {layer: norms[layer.index] for layer in layers}


def language_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Token ids [B, n] and their mask."""
    return batch[OBS_LANGUAGE_TOKENS], batch[OBS_LANGUAGE_ATTENTION_MASK].to(torch.bool)


class PrefixLayout:
    """Positions of the prefix's tokens, counted while the policy embeds them.

    Each camera gives as many tokens as its projector outputs; cameras missing from the batch come last, masked.
    """

    def __init__(self, policy: Any, batch: Batch) -> None:
        self.images, self.image_masks = policy._preprocess_images(batch)
        self.tokens, self.language_mask = language_of(batch)
        self._projector = policy.model.paligemma_with_expert.paligemma.model.multi_modal_projector
        self._counts: list[int] = []

    def counting(self) -> "_Counting":
        """Context in which the policy must embed its images."""
        return _Counting(self)

    @property
    def mask(self) -> Tensor:
        """[B, T]."""
        cameras = [mask[:, None].expand(-1, n) for mask, n in zip(self.image_masks, self._counts, strict=True)]
        return torch.cat([*cameras, self.language_mask], dim=1)

    @property
    def spans(self) -> TokenSpans:
        """Cameras in the policy's order, then the prompt (which contains pi0_fast's state)."""
        image, start = [], 0
        for count in self._counts:
            image.append((start, start + count))
            start += count
        return TokenSpans(image=tuple(image), language=(start, start + self.tokens.shape[1]))


class _Counting:
    def __init__(self, layout: PrefixLayout) -> None:
        self._layout = layout
        self._outputs = outputs_of(layout._projector)

    def __enter__(self) -> None:
        self._seen = self._outputs.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._outputs.__exit__(*error)
        # Gradient checkpointing may call the projector again: the first calls are the images, in order.
        self._layout._counts = token_count(self._seen)[: len(self._layout.images)]


def prefix_reach(last_layer: int) -> list[str]:
    """Modules that affect the backbone's hidden states at `last_layer`."""
    decoder = f"{BACKBONE}.model.language_model"
    return [
        f"{BACKBONE}.model.vision_tower",
        f"{BACKBONE}.model.multi_modal_projector",
        f"{decoder}.embed_tokens",
        *(f"{decoder}.layers.{i}" for i in range(last_layer + 1)),
    ]


def deepest(layers: Sequence[Layer]) -> int:
    """The largest layer index."""
    return max(layer.index for layer in layers)
