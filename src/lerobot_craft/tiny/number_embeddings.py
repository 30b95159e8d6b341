"""Embeddings of the numbers in a prompt that begin close together where the numbers are close.

pi0_fast and pi05 write the state into the prompt as numbers from 0 to 255. A language model that has read text knows
that 117 is next to 118; one with random weights would have to learn 256 words one by one, from few demonstrations, and
acts badly between those that it has met. So the random rows are replaced by sines and cosines of the number: what a few
hundred thousand parameters can be given of what a pretrained model brings along.
"""

import math

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

STATE_BINS = 256
_LOWEST, _HIGHEST = -1.0, 4.0  # octaves: from a quarter of a wave over the whole range to eight waves


def smooth_numbers(embedding: Tensor, tokenizer: PreTrainedTokenizerBase, generator: torch.Generator) -> None:
    """Overwrite the rows of ` 0` to ` 255` in an embedding [V, D], at the scale of the others.

    Args:
        embedding: Changed in place.
        tokenizer: Whose tokens the rows belong to; every number must be one token.
        generator: Of the phases.
    """
    rows = [tokenizer.encode(f" {number}", add_special_tokens=False) for number in range(STATE_BINS)]
    if any(len(tokens) != 1 for tokens in rows):
        raise ValueError("a number from 0 to 255 is more than one token")
    half = embedding.shape[1] // 2
    number = torch.linspace(0, 1, STATE_BINS)[:, None]
    waves = math.pi * 2 ** torch.linspace(_LOWEST, _HIGHEST, half)[None]
    phase = 2 * math.pi * torch.rand(1, half, generator=generator)
    smooth = torch.cat([(waves * number + phase).sin(), (waves * number + phase).cos()], dim=1)
    smooth = torch.nn.functional.pad(smooth, (0, embedding.shape[1] - 2 * half))
    with torch.no_grad():
        embedding[[tokens[0] for tokens in rows]] = (2**0.5 * embedding.std() * smooth).to(embedding)
