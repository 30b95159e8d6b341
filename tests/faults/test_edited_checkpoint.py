"""Valid JSON of another content in a checkpoint that a run starts from: nothing has checksums of these files.

Each edit is refused with a sentence that names the file, before the first step. lerobot would raise whatever Python
raises at the first use, or, without a normalizer, use the policy on raw values and say nothing.
"""

import json
import shutil

import pytest

from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.rollouts import env_config, load_player

CONFIG, BEFORE, AFTER = "config.json", "policy_preprocessor.json", "policy_postprocessor.json"


def without(name):
    """The processor without a step."""

    def change(content):
        kept = [step for step in content["steps"] if step["registry_name"] != name]
        assert len(kept) == len(content["steps"]) - 1
        return content | {"steps": kept}

    return change


def with_setting(step_name, setting, value):
    def change(content):
        for step in content["steps"]:
            if step["registry_name"] == step_name:
                step["config"][setting] = value
        return content

    return change


def without_statistics(content):
    for step in content["steps"]:
        step.pop("state_file", None)
    return content


def state_renamed(content):
    content["steps"][0]["config"]["rename_map"] = {"observation.state": "observation.joints"}
    return content


TOKENS = "no step of it gives the policy its observation.language.attention_mask"
FAILS = "its steps fail on a frame of this policy"
EDITS = {
    "no tokenizer": ("smolvla", BEFORE, without("tokenizer_processor"), TOKENS),
    "no tokenizer, tokens out": ("pi0_fast", BEFORE, without("tokenizer_processor"), TOKENS),
    "no tokenizer of actions": (
        "pi0_fast",
        BEFORE,
        without("craft_action_tokenizer_processor"),
        "no step of it gives the policy its action.token_mask",
    ),
    "no normalizer": ("act", BEFORE, without("normalizer_processor"), "no step that normalizes"),
    "nothing undoes it": ("act", AFTER, without("unnormalizer_processor"), "no step that normalizes"),
    "statistics not read": ("act", BEFORE, without_statistics, "none of its steps reads the statistics in policy_pre"),
    "no steps": ("act", BEFORE, lambda content: content | {"steps": []}, "no step that normalizes"),
    "a step without a name": ("act", AFTER, lambda content: {"steps": [{}]}, r"steps\[0\] has no registry_name"),
    "state under another name": ("act", BEFORE, state_renamed, "gives the policy its observation.state"),
    "names renamed to null": (
        "act",
        BEFORE,
        with_setting("rename_observations_processor", "rename_map", None),
        FAILS,
    ),
    "padding that is none": ("smolvla", BEFORE, with_setting("tokenizer_processor", "padding", ["longest"]), FAILS),
    "settings of no object": ("act", AFTER, with_setting("unnormalizer_processor", "norm_map", ""), FAILS),
    "half a resolution": ("smolvla", CONFIG, lambda content: content | {"resize_imgs_with_padding": [28]}, "2 items"),
    "a size that is none": ("act", CONFIG, lambda content: content | {"n_heads": 0}, "describes"),
    "a dimension below zero": ("act", CONFIG, lambda content: content | {"dim_model": -16}, "describes"),
    "no flag": (
        "smolvla",
        CONFIG,
        lambda content: content | {"train_state_proj": None},
        "requires_grad must be a bool",
    ),
    "no inputs": ("act", CONFIG, lambda content: content | {"input_features": None}, ""),
    "inputs in a list": ("act", CONFIG, lambda content: content | {"input_features": []}, ""),
}
REMOVED = ("no tokenizer", "no normalizer", "nothing undoes it", "a size that is none", "half a resolution")


@pytest.fixture
def edited(checkpoints, tmp_path):
    """Function that copies a checkpoint with one file edited: the copy, and what a refusal must say."""

    def edit(name):
        policy_type, file, change, sentence = EDITS[name]
        copy = shutil.copytree(checkpoints(policy_type), tmp_path / "edited")
        content = json.loads((copy / file).read_text())
        (copy / file).write_text(json.dumps(change(content)))
        return policy_type, copy, rf"{file}.*{sentence}.*[Cc]opy the checkpoint again"

    return edit


@pytest.mark.parametrize("name", EDITS)
def test_a_teacher_is_not_loaded_from_it(name, edited):
    _, copy, sentence = edited(name)
    with pytest.raises(CraftError, match=sentence):
        load_teacher(copy)


@pytest.mark.parametrize("enabled", ["true", "false"])
@pytest.mark.parametrize("name", REMOVED)
def test_no_run_starts_from_it(name, enabled, edited, train_flags, craft_train, tmp_path, capfd):
    policy_type, copy, _ = edited(name)
    ours = [f"--craft.enabled={enabled}", "--craft.old_instructions=open the drawer"]
    assert craft_train(*train_flags(policy_type, tmp_path / "run", policy__path=copy), *ours) == 2
    said = capfd.readouterr().err
    assert "Traceback" not in said
    *_, sentence = said.splitlines()
    assert sentence.startswith("craft: ")
    assert str(copy) in sentence
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["no normalizer", "a size that is none"])
def test_no_player_is_loaded_from_it(name, edited):
    _, copy, _ = edited(name)
    with pytest.raises(CraftError, match=str(copy)):
        load_player(copy, env_config("pusht", {}))


def test_untouched_ones_are_loaded(checkpoints):
    """What is refused above is refused for the edit: steps run on a made frame of every policy that we know."""
    for policy_type in ("act", "diffusion", "pi0", "pi05", "pi0_fast", "smolvla"):
        assert load_teacher(checkpoints(policy_type)).policy is not None
