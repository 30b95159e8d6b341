"""Two modes in one run: a cache, a budget and multipliers for each, on the same anchors."""

import json

import pytest

from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.cli.flags import spelled
from lerobot_craft.cli.train import flag_of
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig, DocumentsConfig
from tests.examples.reading import weights


@pytest.fixture
def flags(train_flags, anchor_data, tmp_path):
    def made(policy_type, out, **settings):
        old = {"craft__old_dataset__repo_id": "local/old", "craft__old_dataset__root": anchor_data / "old"}
        common = {"craft__enabled": "true", "craft__num_anchors": 12, "craft__anchor_cache_dir": tmp_path / "anchors"}
        both = {"craft__retention_mode": "hidden+action", "craft__retention_freq": 1, "craft__anchor_batch_size": 6}
        return train_flags(policy_type, out, **{**old, **common, **both, **settings})

    return made


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("policy_type", ["pi0_fast", "smolvla"])
def test_a_run_holds_both_and_resumes_to_the_same_bits(craft_train, flags, tmp_path, policy_type):
    assert craft_train(*flags(policy_type, tmp_path / "whole", steps=4)) == 0
    kinds = {mode: Manifest.load(tmp_path / "anchors" / mode).kind for mode in ("hidden", "action")}
    assert kinds == {"hidden": "hidden", "action": "action"}
    last = [row for row in metrics(tmp_path / "whole") if "mode_loss/hidden" in row][-1]
    assert last["mode"] == "hidden+action"
    assert last["mode_loss/hidden"] > 0
    assert last["mode_loss/action"] > 0
    state = json.loads((tmp_path / "whole/checkpoints/000004/training_state/craft_state.json").read_text())
    assert "hidden: " in json.dumps(state)
    assert craft_train(*flags(policy_type, tmp_path / "cut", steps=4, save_freq=2)) == 0
    config = tmp_path / "cut/checkpoints/000002/pretrained_model/train_config.json"
    assert craft_train(f"--config_path={config}", "--resume=true", "--steps=4") == 0
    one, other = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"retention_mode": "hidden+hidden"}, "names a mode twice"),
        ({"retention_mode": "hidden_multi_layer+hidden"}, "names a mode twice"),
        ({"retention_mode": "hidden+magic"}, "--craft.retention_mode must be one of .* got 'magic'"),
        ({"retention_mode": "hidden+action", "loss_type": "mse"}, "leave out --craft.loss_type"),
        ({"retention_mode": "hidden+action", "teacher": "online"}, "leave out .*--craft.teacher=online"),
    ],
)
def test_what_does_not_go_together_is_refused(settings, said):
    with pytest.raises(CraftError, match=said), spelled(flag_of):
        CraftConfig(**settings)


def test_each_mode_alone_has_its_directory(tmp_path):
    config = DocumentsConfig(retention_mode="hidden_multi_layer+action", anchor_cache_dir=tmp_path)
    assert config.modes == ("hidden", "action")
    assert [own.anchor_cache_dir for own in config.by_mode()] == [tmp_path / "hidden", tmp_path / "action"]
