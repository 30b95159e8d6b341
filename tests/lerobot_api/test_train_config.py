"""lerobot-train's command line through its own parser, and its refusals as sentences."""

import json
import sys

import pytest

import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.train_config import parse_train_config, print_train_help

PUSH = "policy.push_to_hub"


@pytest.fixture
def flags(train_flags, tmp_path):
    """Function to the flags of a run; `policy__push_to_hub=None` leaves the choice to lerobot's default."""

    def made(**changes):
        return train_flags("act", tmp_path / "run", **changes)

    return made


def test_what_the_policy_and_the_flags_say_is_there(flags, checkpoints):
    cfg = parse_train_config(flags(policy__n_action_steps=4))
    assert (cfg.steps, cfg.batch_size, cfg.policy.n_action_steps) == (3, 2, 4)
    assert cfg.policy.pretrained_path == checkpoints("act")
    assert cfg.optimizer is not None, "validated: the policy's preset is filled in"


def test_a_policy_that_goes_to_nowhere_on_the_hub_is_trained_without_being_pushed(checkpoints, tmp_path, train_flags):
    """`save_pretrained` writes lerobot's default, push_to_hub=true without a repo_id, into every config."""
    copy = tmp_path / "policy"
    copy.mkdir()
    settings = json.loads((checkpoints("act") / "config.json").read_text()) | {"push_to_hub": True, "repo_id": None}
    (copy / "config.json").write_text(json.dumps(settings))
    cfg = parse_train_config(train_flags("act", tmp_path / "run", policy__path=copy, policy__push_to_hub=None))
    assert cfg.policy.push_to_hub is False
    assert cfg.policy.repo_id is None


@pytest.mark.parametrize("written", [[f"--{PUSH}=true"], [f"--{PUSH}", "true"]], ids=["one word", "two words"])
def test_who_asks_to_push_must_say_where_to(written, flags):
    with pytest.raises(CraftError, match="'repo_id' argument missing"):
        parse_train_config([*flags(policy__push_to_hub=None), *written])


def test_who_says_where_to_is_pushed(flags):
    cfg = parse_train_config(flags(policy__push_to_hub="true", policy__repo_id="me/policy"))
    assert (cfg.policy.push_to_hub, cfg.policy.repo_id) == (True, "me/policy")


def test_a_reward_model_is_lerobot_trains(flags):
    with pytest.raises(CraftError, match="train a reward model with lerobot-train"):
        parse_train_config(flags(policy__path=None, reward_model__type="reward_classifier"))


@pytest.mark.parametrize("policy", [{}, {"policy__push_to_hub": None}], ids=["no push", "default"])
def test_a_remote_job_would_leave_craft_here(policy, flags):
    with pytest.raises(CraftError, match=r"--job.target=a10g-small sends lerobot-train to another machine"):
        parse_train_config(flags(job__target="a10g-small", **policy))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "--steps must be at least 1; got 0"),
        ({"batch_size": -1}, "--batch_size must be at least 1; got -1"),
        ({"steps": "many"}, "many"),
        ({"stepz": 1}, "unrecognized arguments: --stepz=1"),
        ({"policy__wings": 2}, "wings"),
        ({"policy__type": "act"}, r"both --policy.path and --policy.type"),
        (
            {"policy__path": None, "policy__device": None, "policy__push_to_hub": None},
            "Neither policy nor reward_model",
        ),
        ({"policy__path": "/nowhere"}, "nowhere"),
        ({"env__type": "moon"}, "moon"),
        ({"discover_packages_path": "no_such_package"}, "no_such_package"),
        ({"config_path": "/nowhere/train_config.json"}, "nowhere"),
        ({"eval_steps": 5}, "eval_split"),
    ],
)
def test_a_refusal_is_one_sentence_and_the_command_line_is_restored(changes, said, flags, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", own := ["craft", "train", "--anything"])
    with pytest.raises(CraftError, match=said) as refusal:
        parse_train_config(flags(**changes))
    assert sys.argv is own
    assert "\n" not in str(refusal.value)
    assert "usage:" not in capfd.readouterr().err


def test_the_command_line_is_lerobots_only_while_it_reads(flags, monkeypatch):
    monkeypatch.setattr(sys, "argv", own := ["craft", "train", "--policy.path=/another", "--craft.enabled=true"])
    cfg = parse_train_config(flags())
    assert sys.argv is own
    assert own == ["craft", "train", "--policy.path=/another", "--craft.enabled=true"]
    assert cfg.policy.type == "act", "read from the given flags, not from the process's own"


def test_a_directory_that_exists_is_named_with_the_way_on(flags, tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CraftError, match="exists already") as refusal:
        parse_train_config(flags())
    assert f"--config_path={tmp_path / 'run'}/checkpoints/last/pretrained_model/train_config.json" in str(refusal.value)


def test_help_is_scoped_to_the_chosen_policy(capsys):
    print_train_help(["--policy.type=smolvla"])
    said = capsys.readouterr().out
    assert "--policy.vlm_model_name" in said
    assert "--policy.use_vae" not in said
