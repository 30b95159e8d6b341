"""Processors of `pi0_tiny`: lerobot's for pi0, with the tokenizer that the config names."""

from typing import Any

from lerobot.policies.pi0 import processor_pi0
from lerobot.processor import TokenizerProcessorStep

from lerobot_craft.tiny.configuration_pi0_tiny import PI0TinyConfig
from lerobot_craft.tiny.swapping import swapped


def make_pi0_tiny_pre_post_processors(config: PI0TinyConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """Make the pair of pipelines as lerobot does for pi0, steps and their order included.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics to normalise by.

    Returns:
        Preprocessor and postprocessor.
    """

    def tokenizer_step(**kwargs: Any) -> TokenizerProcessorStep:
        return TokenizerProcessorStep(**{**kwargs, "tokenizer_name": config.text_tokenizer_name})

    with swapped(processor_pi0, {"TokenizerProcessorStep": tokenizer_step}):
        pipelines: tuple[Any, Any] = processor_pi0.make_pi0_pre_post_processors(config, dataset_stats)
    return pipelines
