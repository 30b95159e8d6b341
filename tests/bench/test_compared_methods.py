import pytest

from lerobot_craft.bench.compared_methods import METHODS, method_named
from lerobot_craft.bench.method_definition import FRAMES_OF_ROLLOUTS, Known, as_argv
from lerobot_craft.cli.flags import parse_flags
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import config_class
from lerobot_craft.training.methods.weight_merge import alpha_name

KNOWN = Known(20, False, "craft/old", "/data/old", "open the door; close it", "all", "/run/anchors")


@pytest.mark.parametrize("name", METHODS)
def test_craft_train_takes_the_flags_of_every_method(name):
    method = METHODS[name]
    values = [None] if method.knob is None else [None, *method.knob.grid]
    for value in values:
        flags = method.train_flags(KNOWN, value)
        craft = {name.removeprefix("craft."): v for name, v in flags.items() if name.startswith("craft.")}
        argv = as_argv(craft)
        config = parse_flags(config_class(argv), argv, "craft train")
        assert config.enabled
        assert config.preload


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.frames == "none"])
def test_a_method_without_old_frames_is_given_none(name):
    assert "/data/old" not in " ".join(as_argv(METHODS[name].train_flags(KNOWN._replace(frames=0), None)))


def test_craft_takes_new_frames_alone_where_there_are_no_old_ones():
    flags = METHODS["craft"].train_flags(KNOWN._replace(frames=0), None)
    assert flags["craft.old_instructions"] == KNOWN.instructions
    assert "craft.old_dataset.root" not in flags
    assert METHODS["craft"].train_flags(KNOWN, None)["craft.old_frames"] == KNOWN.frames


def test_of_own_rollouts_replay_takes_all_frames_and_craft_a_hundred():
    own = KNOWN._replace(frames=FRAMES_OF_ROLLOUTS, rollouts=True)
    assert METHODS["craft"].train_flags(own, None)["craft.old_frames"] == 100
    assert METHODS["er"].train_flags(own, None)["craft.replay_frames"] >= 10**9
    assert METHODS["er"].train_flags(own, None)["craft.old_dataset.root"] == "/data/old"


def test_without_instructions_craft_takes_the_old_frames_and_nothing_else():
    flags = METHODS["craft"].train_flags(KNOWN._replace(instructions=""), None)
    assert flags["craft.num_anchors"] == KNOWN.frames
    assert not {"craft.old_instructions", "craft.old_frames"} & set(flags)


def test_the_merged_policy_is_the_one_that_is_evaluated():
    method = METHODS["merge"]
    for alpha in method.knob.grid:
        assert method.checkpoint_of(alpha) == f"merged/{alpha_name(alpha)}/pretrained_model"
    assert method.checkpoint_of(None) == method.checkpoint_of(method.knob.value)


def test_every_knob_has_its_own_value_in_its_grid():
    for method in METHODS.values():
        assert method.knob is None or method.knob.value in method.knob.grid


def test_a_variant_is_the_method_with_flags_that_win_over_its_own():
    variant = method_named("hidden_documents --craft.loss_type=cosine --craft.hidden_layer=-1")
    plain = METHODS["hidden_documents"]
    assert variant.name == "hidden_documents+loss_type=cosine+hidden_layer=-1"
    assert variant.label == f"{plain.label}, loss_type=cosine, hidden_layer=-1"
    assert variant.train_flags(KNOWN, None) == plain.train_flags(KNOWN, None) | {
        "craft.loss_type": "cosine",
        "craft.hidden_layer": "-1",
    }


def test_a_variant_without_flags_is_the_method():
    assert method_named("er") is METHODS["er"]


@pytest.mark.parametrize("typed", ["craft craft.retention_freq=2", "craft --craft.retention_freq 2"])
def test_a_variant_that_is_not_typed_as_flags_is_refused(typed):
    with pytest.raises(CraftError, match=r"--variant: .* is no flag of craft train: write --craft.NAME=VALUE"):
        method_named(typed)
