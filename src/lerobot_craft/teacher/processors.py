"""Content of a teacher's processors: statistics, tokenizers and steps, without paths or devices."""

import json
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lerobot_craft.lerobot_api.processors import Processor, ProcessorStep, is_normalizer, step_name

# These settings do not affect what a step computes: its device, its tokenizer's location, a dataset's feature names.
_PLACES = {"device", "tokenizer_name", "action_tokenizer_name", "paligemma_tokenizer_name", "rename_map"}
# A fast tokenizer keeps the padding and truncation of its last call; the step sets both on every call.
_LAST_CALL = {"padding", "truncation"}
_FAST_NUMBERS = ("scale", "min_token", "max_token", "vocab_size")


def normalizer_stats(preprocessor: Processor) -> dict[str, dict[str, Tensor]]:
    """Feature -> statistic -> values that the teacher ships, on the CPU; empty if it ships none."""
    stats: dict[str, dict[str, Tensor]] = {}
    for step in filter(is_normalizer, preprocessor.steps):
        for key, values in step.state_dict().items():
            feature, _, stat = key.rpartition(".")
            stats.setdefault(feature, {})[stat] = values
    return stats


def step_tensors(processor: Processor) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a processor's steps, as `position.key`; in lerobot these are the statistics."""
    stateful = (step.state_dict() for step in processor.steps)
    for position, state in enumerate(filter(None, stateful)):
        yield from ((f"{position}.{key}", state[key]) for key in sorted(state))


def steps(processor: Processor) -> list[dict[str, Any]]:
    """The steps in order, with settings; only the name for steps that tokenize: see `tokenizers`."""
    return [
        {"step": step_name(step), "config": {} if _tokenizers_of(step) else _settings(step)} for step in processor.steps
    ]


def tokenizers(processor: Processor) -> list[dict[str, Any]]:
    """The steps that tokenize, in order, with settings and the content of their tokenizers."""
    found = ((step, _tokenizers_of(step)) for step in processor.steps)
    return [
        {
            "step": step_name(step),
            "config": _settings(step),
            "fast_skip_tokens": getattr(step, "fast_skip_tokens", None),  # lerobot's own step omits it
            "tokenizers": {name: _content(tokenizer) for name, tokenizer in held.items()},
        }
        for step, held in found
        if held
    ]


def _settings(step: ProcessorStep) -> dict[str, Any]:
    return {key: value for key, value in step.get_config().items() if key not in _PLACES}


def _tokenizers_of(step: ProcessorStep) -> dict[str, Any]:
    return {name: value for name, value in vars(step).items() if _is_tokenizer(value)}


def _is_tokenizer(value: object) -> bool:
    return hasattr(value, "get_vocab") or hasattr(value, "bpe_tokenizer") or hasattr(value, "tokenizer")


def _content(tokenizer: Any) -> dict[str, Any]:
    """Everything that determines the ids of a text or an action chunk."""
    if hasattr(tokenizer, "bpe_tokenizer"):  # FAST: DCT coefficients, scaled and shifted, then BPE
        numbers = {name: getattr(tokenizer, name, None) for name in _FAST_NUMBERS}
        return {**numbers, "bpe": _content(tokenizer.bpe_tokenizer)}
    if hasattr(tokenizer, "tokenizer"):  # a processor for text and images
        return _content(tokenizer.tokenizer)
    content = {
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **{name: getattr(tokenizer, name, None) for name in ("vocab_size", "add_bos_token", "add_eos_token")},
    }
    if hasattr(tokenizer, "backend_tokenizer"):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        return {**content, "backend": {key: value for key, value in backend.items() if key not in _LAST_CALL}}
    return {**content, "vocabulary": tokenizer.get_vocab()}
