"""Processors of `pi05_tiny`: lerobot's for pi05, with the tokenizer that the config names."""

from typing import Any

from lerobot.policies.pi05 import processor_pi05
from lerobot.processor import TokenizerProcessorStep

from lerobot_craft.tiny.configuration_pi05_tiny import PI05TinyConfig
from lerobot_craft.tiny.swapping import swapped


def make_pi05_tiny_pre_post_processors(config: PI05TinyConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """Make the pair of pipelines as lerobot does for pi05, steps and their order included.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics to normalise by.

    Returns:
        Preprocessor and postprocessor.
    """

    def tokenizer_step(**kwargs: Any) -> TokenizerProcessorStep:
        return TokenizerProcessorStep(**{**kwargs, "tokenizer_name": config.text_tokenizer_name})

    with swapped(processor_pi05, {"TokenizerProcessorStep": tokenizer_step}):
        pipelines: tuple[Any, Any] = processor_pi05.make_pi05_pre_post_processors(config, dataset_stats)
    return pipelines
