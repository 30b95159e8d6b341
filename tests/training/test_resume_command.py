import shlex
import sys

import pytest

from lerobot_craft.training.checkpoints import resume_command


@pytest.mark.parametrize(
    "typed", [["--env.discover_packages_path=my.envs"], ["--env.discover_packages_path", "my.envs"]]
)
def test_packages_that_lerobot_was_told_to_import_are_named_again(typed, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["craft", "train", *typed, "--env.type=mine", "--steps", "3"])
    words = shlex.split(resume_command(tmp_path / "000010"))
    assert words[3:] == ["--resume=true", "--env.discover_packages_path=my.envs"]
