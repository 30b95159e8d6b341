import json

import pytest
from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig
from lerobot.policies.pi0_fast.processor_pi0_fast import make_pi0_fast_pre_post_processors
from lerobot.processor import ActionTokenizerProcessorStep, TokenizerProcessorStep

from lerobot_craft.tiny.pi import (
    SavedWholeActionTokenizerStep,
    make_pi0_fast_tiny_pre_post_processors,
)
from tests.tiny import robot


def saved_steps(directory):
    steps = json.loads((directory / "policy_preprocessor.json").read_text())["steps"]
    return {step["registry_name"]: step["config"] for step in steps}


def test_the_saved_action_step_names_its_text_tokenizer(checkpoint):
    config = saved_steps(checkpoint("pi0_fast"))["craft_action_tokenizer_processor"]
    assert config["paligemma_tokenizer_name"] == str(checkpoint("pi0_fast") / "assets" / "text_tokenizer")
    assert config["fast_skip_tokens"] == 0


@pytest.mark.parametrize("policy_type", ["pi0", "pi05"])
def test_the_saved_text_step_names_our_tokenizer(checkpoint, policy_type):
    config = saved_steps(checkpoint(policy_type))["tokenizer_processor"]
    assert config["tokenizer_name"] == str(checkpoint(policy_type) / "assets" / "text_tokenizer")


def test_step_order_is_lerobots(checkpoint):
    config = PreTrainedConfig.from_pretrained(checkpoint("pi0_fast"))
    stock = PI0FastConfig(
        device="cpu",
        input_features=robot.INPUTS,
        output_features=robot.OUTPUTS,
        text_tokenizer_name=config.text_tokenizer_name,
        action_tokenizer_name=config.action_tokenizer_name,
    )
    theirs, _ = make_pi0_fast_pre_post_processors(stock, robot.stats())
    ours, _ = make_pi0_fast_tiny_pre_post_processors(config, robot.stats())
    replaced = {SavedWholeActionTokenizerStep: ActionTokenizerProcessorStep}
    assert [replaced.get(type(step), type(step)) for step in ours.steps] == [type(step) for step in theirs.steps]


def test_lerobots_own_names_are_back_after_building(checkpoint):
    from lerobot.policies.pi0 import processor_pi0
    from lerobot.policies.pi0_fast import processor_pi0_fast

    checkpoint("pi0")
    checkpoint("pi0_fast")
    assert processor_pi0.TokenizerProcessorStep is TokenizerProcessorStep
    assert processor_pi0_fast.ActionTokenizerProcessorStep is ActionTokenizerProcessorStep
