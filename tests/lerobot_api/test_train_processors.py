"""Our call for processors is the one of lerobot's training script: both are caught in the act and compared."""

from types import SimpleNamespace

import pytest
import torch

from lerobot_craft.lerobot_api.pretrained import load_policy_config
from lerobot_craft.lerobot_api.processors import train_processors


class CaughtCall(Exception):  # noqa: N818  it is not an error
    def __init__(self, **arguments):
        self.arguments = arguments


def caught(function, *arguments):
    with pytest.raises(CaughtCall) as call:
        function(*arguments)
    return call.value.arguments


def catch(*_, **arguments):
    raise CaughtCall(**arguments)


def settings(policy, anchor_data, **flags):
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig

    data = DatasetConfig("local/new", root=str(anchor_data / "new"))
    cfg = TrainPipelineConfig(dataset=data, policy=policy, seed=None, **flags)
    cfg.validate = lambda: None  # it reads this process's command line
    return cfg


def lerobots_call(cfg, monkeypatch):
    """The policy, the data's statistics and the arguments with which lerobot's own script asks for processors."""
    from lerobot.scripts import lerobot_train

    seen = {}

    def make_policy(**arguments):
        seen["policy"], seen["stats"] = make(**arguments), arguments["ds_meta"].stats
        return seen["policy"]

    make = lerobot_train.make_policy
    monkeypatch.setattr(lerobot_train, "make_policy", make_policy)
    monkeypatch.setattr(lerobot_train, "make_pre_post_processors", catch)
    monkeypatch.setattr(lerobot_train, "init_logging", lambda **_: None)
    alone = SimpleNamespace(is_main_process=True, device=torch.device("cpu"), wait_for_everyone=lambda: None)
    arguments = caught(lerobot_train.train.__wrapped__, cfg, alone)
    return seen["policy"], seen["stats"], arguments


CASES = {
    "fine-tuning": ("act", {}),
    "resumed": ("act", {"resume": True}),
    "renamed": ("smolvla", {"rename_map": {"observation.images.front": "observation.images.top"}}),
    "relative actions": ("pi0", {}),
    "from scratch": ("diffusion", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_processors_are_asked_for_as_lerobot_train_does(case, checkpoints, anchor_data, monkeypatch):
    policy_type, flags = CASES[case]
    config = load_policy_config(checkpoints(policy_type))
    if case == "relative actions":
        config.use_relative_actions = True
    if case == "from scratch":
        config.pretrained_path = None
    cfg = settings(config, anchor_data, **flags)
    policy, stats, lerobots = lerobots_call(cfg, monkeypatch)
    monkeypatch.setattr("lerobot.policies.factory.make_pre_post_processors", catch)
    ours = caught(train_processors, cfg, policy, stats, torch.device("cpu"))
    assert ours == lerobots
    assert (ours.get("dataset_stats") is stats) == (case != "resumed")
