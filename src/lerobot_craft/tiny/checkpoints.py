"""Checkpoint directories of small real policies, made without a download."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors
from numpy.typing import ArrayLike
from transformers import AutoTokenizer

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.number_embeddings import smooth_numbers
from lerobot_craft.tiny.recipes import RECIPES, Ingredients, Stats
from lerobot_craft.tiny.sizes import TinySizes

POLICY_TYPES = tuple(RECIPES)
_CHUNK_SIZE = 8
_STATE_IN_PROMPT = ("pi0_fast", "pi05")
_STATS_OF = {
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}


def make_checkpoint(
    policy_type: str,
    directory: Path | str,
    *,
    input_features: dict[str, PolicyFeature],
    output_features: dict[str, PolicyFeature],
    dataset_stats: Stats,
    instructions: Iterable[str] = (),
    action_chunks: ArrayLike | None = None,
    sizes: TinySizes | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Make a policy with random weights, its processors and its tokenizers, and save all as a checkpoint.

    `config.json` names the tokenizers, which lie in `directory/assets`, by absolute path: move the directory and they
    are no longer found.

    Args:
        policy_type: One of `POLICY_TYPES`. The pi family needs a camera; act and diffusion a camera or
            `observation.environment_state`, and with a camera they carry a ResNet-18 of 11 million parameters.
        directory: Where to save.
        input_features: Observations by name.
        output_features: The action.
        dataset_stats: Statistics that the processors normalise by: min and max for pi0_fast and diffusion, q01 and q99
            for pi05, mean and std for the others.
        instructions: Every instruction the policy will be given, of old tasks and new. Words that are in none of them
            are spelt in bytes and may not fit into the prompt.
        action_chunks: Actions [N, H, A], not normalised, that pi0_fast's action tokenizer is fitted on.
        sizes: Sizes to build at; the defaults of `TinySizes` if None.
        seed: Seed of the weights. The caller's random state stays as it was.
        **config_overrides: Fields of the policy's configuration. `chunk_size` is the length of `action_chunks`, or 8;
            the device is the CPU.

    Returns:
        The directory.
    """
    if policy_type not in RECIPES:
        raise CraftError(f"There is no small {policy_type!r} policy; choose one of {', '.join(POLICY_TYPES)}.")
    directory = Path(directory).resolve()
    registered_name, recipe = RECIPES[policy_type]
    made_from = Ingredients(
        assets=directory / "assets",
        input_features=input_features,
        output_features=output_features,
        dataset_stats=dataset_stats,
        instructions=tuple(instructions),
        action_chunks=action_chunks,
        sizes=sizes or TinySizes(),
        chunk_size=_chunk_size(action_chunks, config_overrides),
        overrides=config_overrides,
    )
    settings = {
        "device": "cpu",
        "push_to_hub": False,
        "input_features": dict(input_features),
        "output_features": dict(output_features),
        **recipe(made_from),
        **config_overrides,
    }
    if policy_type == "diffusion":
        settings.pop("chunk_size", None)
    config = make_policy_config(registered_name, **settings)
    _require_stats(config, dataset_stats)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = get_policy_class(config.type)(config)
    if policy_type in _STATE_IN_PROMPT:
        tokenizer = AutoTokenizer.from_pretrained(config.text_tokenizer_name)
        smooth_numbers(_word_embedding(policy), tokenizer, torch.Generator().manual_seed(seed))
    for part in (policy, *make_pre_post_processors(config, dataset_stats=dataset_stats)):
        part.save_pretrained(directory)
    return directory


def _word_embedding(policy: Any) -> torch.Tensor:
    model = policy.model.paligemma_with_expert.paligemma.model.language_model
    embedding: torch.Tensor = model.get_input_embeddings().weight
    return embedding


def _chunk_size(action_chunks: ArrayLike | None, overrides: dict[str, Any]) -> int:
    asked = overrides.get("chunk_size", overrides.get("horizon"))
    if action_chunks is None:
        return int(asked or _CHUNK_SIZE)
    length = int(np.shape(action_chunks)[1])
    if asked not in (None, length):
        raise CraftError(f"chunk_size={asked}, but the action chunks have {length} steps: make them agree.")
    return length


def _require_stats(config: Any, dataset_stats: Stats) -> None:
    """Refuse statistics that lerobot's normaliser would do without, silently or at the first batch."""
    for name, feature in {**config.input_features, **config.output_features}.items():
        # An image without statistics is used as it is, in lerobot's own examples too.
        if feature.type is FeatureType.VISUAL:
            continue
        mode = config.normalization_mapping.get(feature.type.value, NormalizationMode.IDENTITY)
        missing = [stat for stat in _STATS_OF.get(mode, ()) if stat not in dataset_stats.get(name, {})]
        if missing:
            raise CraftError(
                f"{config.type} normalises {name} by {mode.value}: give its {' and '.join(missing)} in dataset_stats."
            )
