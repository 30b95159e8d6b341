"""Shapes of a policy's training inputs, from its config and the dataset's metadata only."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch


class Shape(NamedTuple):
    """Shape and dtype of one sample."""

    size: tuple[int, ...]
    dtype: torch.dtype


def input_shapes(
    config: Any, dataset_meta: Any | None, rename_map: Mapping[str, str] | None = None
) -> dict[str, Shape]:
    """Every tensor of a preprocessed sample, by name.

    Images have the dataset's size. A prompt has the policy's maximum length.

    Args:
        config: lerobot's policy config with its features.
        dataset_meta: The dataset's metadata; None: shapes from the config.
        rename_map: The dataset's names -> the policy's.
    """
    found = {name: tuple(feature.shape) for name, feature in (config.input_features | config.output_features).items()}
    if dataset_meta is not None:
        present = _present(dataset_meta, rename_map or {})
        found = {name: present[name] for name in found if name in present}
    shapes: dict[str, Shape] = {}
    for name, size in found.items():
        steps = config.action_delta_indices if name in config.output_features else config.observation_delta_indices
        shapes[name] = Shape(size if steps is None else (len(steps), *size), torch.float32)
        if steps is not None:
            shapes[f"{name}_is_pad"] = Shape((len(steps),), torch.bool)
    return shapes | token_shapes(config)


def _present(dataset_meta: Any, rename_map: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    from lerobot.utils.feature_utils import dataset_to_policy_features

    features = dataset_to_policy_features(dataset_meta.features)
    return {rename_map.get(name, name): tuple(feature.shape) for name, feature in features.items()}


def token_shapes(config: Any) -> dict[str, Shape]:
    """What steps of the preprocessor add to a sample: tokens of the prompt and of the actions, and their masks."""
    from lerobot.utils.constants import (
        ACTION_TOKEN_MASK,
        ACTION_TOKENS,
        OBS_LANGUAGE_ATTENTION_MASK,
        OBS_LANGUAGE_TOKENS,
    )

    shapes: dict[str, Shape] = {}
    lengths = {
        (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK): getattr(config, "tokenizer_max_length", None),
        (ACTION_TOKENS, ACTION_TOKEN_MASK): getattr(config, "max_action_tokens", None),
    }
    for (tokens, mask), length in lengths.items():
        if length is not None:
            shapes |= {tokens: Shape((length,), torch.long), mask: Shape((length,), torch.bool)}
    return shapes
