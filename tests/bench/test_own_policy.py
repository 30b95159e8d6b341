import shlex

import pytest

from lerobot_craft.bench.compared_methods import METHODS
from lerobot_craft.bench.demo_run import INSTRUCTIONS, NEW_DATA, OLD_DATA, POLICY, own_policy_commands
from lerobot_craft.bench.method_definition import Known, as_argv
from lerobot_craft.cli.flags import parse_flags
from lerobot_craft.cli.train import split_flags
from lerobot_craft.training.config import CraftConfig

TRAINING = [advice.words for advice in own_policy_commands()[:2]]


def settings_of(flags):
    return vars(parse_flags(CraftConfig, split_flags(flags)[0], "craft train"))


@pytest.mark.parametrize("words", TRAINING, ids=["no old frames", "old frames"])
def test_craft_train_takes_them_as_they_stand(words, checkpoints, anchor_data):
    from lerobot_craft.training.run_settings import read_settings

    assert words[:2] == ["craft", "train"]
    here = {f"--policy.path={POLICY}": f"--policy.path={checkpoints('smolvla')}"}
    craft, rest = split_flags([here.get(word, word) for word in words[2:]])
    cfg, found = read_settings(rest, lambda saved: parse_flags(CraftConfig, craft, "craft train", saved))
    assert cfg.dataset.repo_id == NEW_DATA
    assert not cfg.policy.push_to_hub
    assert f"--steps={cfg.steps}" in words
    assert (cfg.batch_size, found.anchor_batch_size) == (32, 0)  # as many anchors as new samples
    assert (found.enabled, found.method, found.old_instructions) == (True, "craft", INSTRUCTIONS)


@pytest.mark.parametrize("words", TRAINING, ids=["no old frames", "old frames"])
def test_they_are_the_recipe(words):
    """What is left out is what `craft train` does anyway, or the bench's own affair."""
    typed = settings_of(words[2:])
    known = Known(typed["old_frames"] or 0, False, OLD_DATA, "", INSTRUCTIONS, "", "")
    recipe = settings_of(as_argv(METHODS["craft"].train_flags(known, None)))
    apart = {"anchor_cache_dir", "log_craft_metrics_freq", "old_dataset", "preload", "probe_anchors"}
    assert {name for name in typed if typed[name] != recipe[name]} <= apart
    assert typed["old_dataset"].repo_id == recipe["old_dataset"].repo_id
    assert not [word for word in words if "preload" in word or "probe_anchors" in word]


def test_a_command_can_be_pasted():
    for advice in own_policy_commands():
        comment, _, command = str(advice).partition("\n")
        assert comment == f"# {advice.purpose}"
        assert shlex.split(command.replace("\\\n", "")) == advice.words
        *lines, last = command.splitlines()
        assert all(line.endswith(" \\") for line in lines)
        assert not last.endswith("\\")
        assert max(map(len, [*lines, last])) <= 120
