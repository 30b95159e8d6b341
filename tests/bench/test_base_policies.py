"""The small policies of the bench fit the suite that they are made for."""

from lerobot_craft.bench.base_policies import CHUNK, POLICIES
from lerobot_craft.bench.metaworld.tasks import STATE_NAMES, TASKS
from lerobot_craft.tiny.tokenizers import make_text_tokenizer


def test_no_prompt_of_the_suite_is_cut_off(tmp_path):
    """lerobot cuts a longer one off without a word, and the state stands last."""
    tokenizer = make_text_tokenizer(tmp_path, [task.instruction for task in TASKS.values()])
    room = POLICIES["pi0_fast"].settings["tokenizer_max_length"]
    below_range = " ".join(["-1"] * len(STATE_NAMES))
    prompts = [f"Task: {task.instruction}, State: {below_range};\nAction: " for task in TASKS.values()]
    assert max(len(tokenizer.encode(prompt)) for prompt in prompts) <= room


def test_as_many_tokens_are_decoded_as_are_trained():
    """All but <bos>, which is given."""
    settings = POLICIES["pi0_fast"].settings
    assert settings["max_decoding_steps"] == settings["max_action_tokens"] - 1
    assert settings["max_action_tokens"] < 5 + 4 * CHUNK, "no shorter than the worst case: leave it to the recipe"
