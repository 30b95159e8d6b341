"""Runs of `craft train` and of stock `lerobot-train`, in this process: importing lerobot is what takes long."""

import logging
import sys
from pathlib import Path

import pytest


@pytest.fixture
def process_as_it_was():
    """What a run leaves in its process: lerobot clears the root logger's handlers, accelerate keeps settings."""
    from accelerate.state import AcceleratorState

    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    AcceleratorState._reset_state(reset_partial_state=True)  # of tests that made an accelerator of their own
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def train_flags(anchor_data, checkpoints):
    """Function from a policy type to the flags of a short run on the new task; others replace or join them."""

    def flags(policy_type: str, output_dir: Path, **changes: object) -> list[str]:
        settings = {
            "dataset.repo_id": "local/new",
            "dataset.root": anchor_data / "new",
            "policy.path": checkpoints(policy_type),
            "policy.device": "cpu",
            "policy.push_to_hub": "false",
            "output_dir": output_dir,
            "steps": 3,
            "batch_size": 2,
            "num_workers": 0,
            "log_freq": 1,
            "env_eval_freq": 0,
            "wandb.enable": "false",
            "seed": 7,
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
        return [f"--{name}={value}" for name, value in settings.items() if value is not None]

    return flags


@pytest.fixture
def craft_train(process_as_it_was, monkeypatch, tmp_path_factory):
    """`craft train` with these flags: the exit code."""
    from lerobot_craft.cli import main

    monkeypatch.setenv("CRAFT_HOME", str(tmp_path_factory.mktemp("craft_home")))

    def run(*flags: str) -> int:
        return main(["train", *flags])

    return run


@pytest.fixture
def lerobot_train(process_as_it_was, monkeypatch):
    """Stock `lerobot-train` with these flags."""
    import lerobot_craft.tiny  # noqa: F401  registers the policies that it makes

    def run(*flags: str) -> None:
        from lerobot.scripts import lerobot_train

        monkeypatch.setattr(sys, "argv", ["lerobot-train", *flags])
        lerobot_train.main()

    return run
