"""Processors of `pi0_fast_tiny`: lerobot's for pi0_fast, with an action tokenizer step that survives saving."""

from dataclasses import dataclass
from typing import Any

from lerobot.policies.pi0_fast import processor_pi0_fast
from lerobot.processor import ActionTokenizerProcessorStep, ProcessorStepRegistry

from lerobot_craft.tiny.configuration_pi0_fast_tiny import PI0FastTinyConfig
from lerobot_craft.tiny.swapping import swapped


@ProcessorStepRegistry.register(name="craft_action_tokenizer_processor")
@dataclass
class SavedWholeActionTokenizerStep(ActionTokenizerProcessorStep):  # type: ignore[misc]
    """lerobot's step, with everything that it needs to be loaded again in its saved configuration.

    lerobot 0.6.1 leaves two fields out, and a reloaded step falls back to the Hub's tokenizer and to skipping 128 ids.
    """

    def get_config(self) -> dict[str, Any]:
        """Return what `__init__` needs, as JSON."""
        return {
            **super().get_config(),
            "fast_skip_tokens": self.fast_skip_tokens,
            "paligemma_tokenizer_name": self.paligemma_tokenizer_name,
        }


def make_pi0_fast_tiny_pre_post_processors(config: PI0FastTinyConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """Make the pair of pipelines as lerobot does for pi0_fast, steps and their order included.

    Args:
        config: The policy's configuration.
        dataset_stats: Statistics to normalise by.

    Returns:
        Preprocessor and postprocessor.
    """
    with swapped(processor_pi0_fast, {"ActionTokenizerProcessorStep": SavedWholeActionTokenizerStep}):
        pipelines: tuple[Any, Any] = processor_pi0_fast.make_pi0_fast_pre_post_processors(config, dataset_stats)
    return pipelines
