"""What a sharded policy cannot do is refused before anything slow; tests/distributed trains sharded ones."""

from types import SimpleNamespace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.weights import check_sharding


def check(processes=2, enabled=True, **changes):
    policy = SimpleNamespace(**{name: changes.pop(name, False) for name in ("push_to_hub", "compile_model")})
    cfg = SimpleNamespace(**{"peft": None, "env": None, "env_eval_freq": 0, "policy": policy} | changes)
    check_sharding(cfg, CraftConfig(enabled=enabled, shard=True), SimpleNamespace(num_processes=processes))


def test_several_processes_with_craft_on_are_fine():
    check()
    check(env_eval_freq=100)  # lerobot's default, without an environment
    check(env=object())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enabled": False}, "needs --craft.enabled=true"),
        ({"processes": 1}, "this is one: start them with `accelerate launch`"),
        ({"peft": object()}, "does not know --peft"),
        ({"env": object(), "env_eval_freq": 5}, "--env_eval_freq=0"),
        ({"push_to_hub": True}, "--policy.push_to_hub=false"),
        ({"compile_model": True}, "does not know --policy.compile_model"),
    ],
)
def test_what_it_cannot_do_is_refused(changes, words):
    with pytest.raises(CraftError, match=rf"^--craft.shard .*{words}"):
        check(**changes)


def test_the_command_says_it_in_one_sentence(train_flags, craft_train, tmp_path, capfd):
    flags = ("--craft.enabled=true", "--craft.shard=true", "--craft.old_instructions=press it")
    assert craft_train(*train_flags("smolvla", tmp_path / "run"), *flags) == 2
    assert "craft: --craft.shard spreads a policy over several processes" in capfd.readouterr().err
