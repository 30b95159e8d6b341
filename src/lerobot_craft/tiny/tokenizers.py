"""Local tokenizers: a stand-in for PaliGemma's text tokenizer, and a FAST action tokenizer fitted on the spot."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.processing_action_tokenizer import FastActionProcessor, as_text, quantise

_SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
STATE_BINS = 256  # the pi prompts write each state dimension as the number of its bin


def make_text_tokenizer(
    directory: Path,
    instructions: Iterable[str],
    num_action_tokens: int = 0,
    extra_special_tokens: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Make a text tokenizer for prompts of the pi family and save it.

    Every word of the instructions, every state number and the prompts' own words are one token each. Any other text is
    split into bytes, so nothing is unknown. Action tokens are at the top of the vocabulary, where lerobot counts down
    from `vocab_size`, as in PaliGemma.

    Args:
        directory: Where to save; `AutoTokenizer.from_pretrained(directory)` loads it.
        instructions: Instructions whose words get a token, old tasks and new.
        num_action_tokens: How many ids to keep free for action tokens.
        extra_special_tokens: Further special tokens by attribute name.

    Returns:
        The tokenizer.
    """
    extra = dict(extra_special_tokens or {})
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words = {word: None for text in _prompts(instructions) for word, _ in bytewise.pre_tokenize_str(text)}
    tokens = [*_SPECIAL.values(), *extra.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [word for word in words if word not in set(tokens)]
    # In the base vocabulary, not added tokens: lerobot reads `vocab_size`, which leaves added tokens out.
    tokens += [f"<action_{number}>" for number in range(num_action_tokens)]

    # No merges: a whole word is looked up first (ignore_merges), and if it is not there its bytes remain.
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = bytewise
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIAL, extra_special_tokens=extra)
    fast.save_pretrained(directory)
    return fast


def _prompts(instructions: Iterable[str]) -> Iterable[str]:
    """Texts with every word that the policies will see, in every position that it can have."""
    yield "Task: , State: ;\nAction: |"
    yield "".join(f" {number}" for number in range(STATE_BINS)) + " -1"
    for instruction in instructions:
        spoken = instruction.strip().replace("_", " ").replace("\n", " ")
        yield f"Task: {spoken}, State:"  # pi0_fast, pi05
        yield f"{instruction}\n"  # pi0, smolvla


def fit_action_tokenizer(
    directory: Path, chunks: ArrayLike, scale: float = 10, vocab_size: int = 512
) -> FastActionProcessor:
    """Fit a FAST action tokenizer on action chunks and save it.

    Args:
        directory: Where to save; `AutoProcessor.from_pretrained(directory, trust_remote_code=True)` loads it.
        chunks: Actions [N, H, A], normalised to about [-1, 1].
        scale: Steps per unit of a cosine coefficient.
        vocab_size: At most this many tokens; fewer when the data has no more pairs to merge.

    Returns:
        The tokenizer.
    """
    actions = np.asarray(chunks, dtype=np.float64)
    if actions.ndim != 3 or not actions.size:
        raise CraftError(f"An action tokenizer is fitted on chunks [N, H, A]; these have shape {actions.shape}.")
    if not np.isfinite(actions).all():
        raise CraftError("The action chunks hold NaN or infinite values: an action tokenizer cannot be fitted on them.")
    coefficients = quantise(actions, scale)
    low, high = int(coefficients.min()), int(coefficients.max())
    alphabet = [chr(offset) for offset in range(high - low + 1)]
    if len(alphabet) >= vocab_size:
        raise CraftError(
            f"The chunks' cosine coefficients take {len(alphabet)} values at scale={scale:g}, and "
            f"vocab_size={vocab_size} leaves no room for merges. Normalise the actions to about [-1, 1], or raise it."
        )
    bpe = Tokenizer(models.BPE())
    bpe.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    bpe.train_from_iterator(as_text(coefficients, low, high), trainer)
    processor = FastActionProcessor(
        PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False),
        scale=scale,
        min_token=low,
        max_token=high,
        vocab_size=bpe.get_vocab_size(),
    )
    # A registered class is saved together with its file, which is what lerobot's `trust_remote_code` runs.
    FastActionProcessor.register_for_auto_class("AutoProcessor")
    processor.save_pretrained(directory)
    return processor
