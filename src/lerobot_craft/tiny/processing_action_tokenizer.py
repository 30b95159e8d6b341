"""FAST: chunks of actions as few tokens, by a cosine transform and byte-pair encoding (Pertsch et al., 2025).

Robot actions are smooth, so a discrete cosine transform along time leaves most of a chunk in a few low frequencies.
Scaled and rounded, the coefficients are small integers with many zeros; each becomes one character, and byte-pair
encoding gives frequent runs of them a token of their own.

`tokenizers.fit_action_tokenizer` copies this file beside the fitted vocabulary, where
`AutoProcessor.from_pretrained(directory, trust_remote_code=True)` runs it: it must import nothing of this package.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.fft import dct, idct
from transformers.processing_utils import ProcessorMixin


def quantise(chunks: ArrayLike, scale: float) -> NDArray[np.int64]:
    """Transform actions [N, H, A] along time and round: integer coefficients [N, H, A], low frequencies first."""
    coefficients: NDArray[np.float64] = dct(np.asarray(chunks, dtype=np.float64), axis=1, norm="ortho")
    return np.rint(coefficients * scale).astype(np.int64)


def as_text(coefficients: NDArray[np.int64], min_token: int, max_token: int) -> list[str]:
    """Write each chunk's coefficients [N, H, A] as a string of H * A characters, clipped to the fitted range."""
    flat = np.clip(coefficients, min_token, max_token).reshape(len(coefficients), -1) - min_token
    return ["".join(map(chr, row)) for row in flat]


class FastActionProcessor(ProcessorMixin):  # type: ignore[misc]
    """The action tokenizer that lerobot's pi0_fast loads.

    Attributes:
        bpe_tokenizer: The byte-pair encoding; lerobot decodes with it.
        scale: Steps per unit of a coefficient: the higher, the finer and the longer.
        min_token: The smallest coefficient that was fitted; its character is `chr(0)`.
        max_token: The largest.
        vocab_size: Number of tokens.
    """

    def __init__(
        self, tokenizer: Any = None, scale: float = 10, min_token: int = 0, max_token: int = 0, vocab_size: int = 0
    ) -> None:
        self.scale, self.min_token, self.max_token, self.vocab_size = scale, min_token, max_token, vocab_size
        super().__init__(tokenizer)

    @property
    def bpe_tokenizer(self) -> Any:
        """The byte-pair encoding."""
        return self.tokenizer

    def __call__(self, action_chunk: ArrayLike) -> list[list[int]]:
        """Encode action chunks.

        Args:
            action_chunk: Normalised actions [N, H, A] or [H, A]. What lies outside the fitted range is clipped.

        Returns:
            A list of token ids for each chunk.
        """
        chunks = np.asarray(action_chunk)
        if chunks.ndim == 2:
            chunks = chunks[None]
        texts = as_text(quantise(chunks, self.scale), self.min_token, self.max_token)
        return [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def decode(self, tokens: Sequence[Sequence[int]], *, time_horizon: int, action_dim: int) -> NDArray[np.float64]:
        """Decode token ids to normalised action chunks.

        Args:
            tokens: Token ids of each chunk. Missing coefficients are zero and surplus ones cut off, as in lerobot.
            time_horizon: H.
            action_dim: A.

        Returns:
            Actions [N, H, A].
        """
        coefficients = np.zeros((len(tokens), time_horizon * action_dim))
        for row, ids in zip(coefficients, tokens, strict=True):
            text = self.tokenizer.decode(list(ids))[: len(row)]
            row[: len(text)] = [ord(character) + self.min_token for character in text]
        chunks = coefficients.reshape(len(tokens), time_horizon, action_dim) / self.scale
        return np.asarray(idct(chunks, axis=1, norm="ortho"))
