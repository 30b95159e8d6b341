"""Environments that cannot be made: what really happens here, where their simulators are not installed."""

import importlib.util
import io
import sys

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import supported_version
from lerobot_craft.lerobot_api.rollouts import Player, env_config, ready

NOBODY = Player(None, None, None, None)  # an environment is made before anybody acts in it


@pytest.mark.parametrize(
    ("env_type", "package", "remedy"),
    [
        ("libero", "libero", f"type pip install 'lerobot[libero]=={supported_version()}'"),
        ("pusht", "gym_pusht", f"type pip install 'lerobot[pusht]=={supported_version()}'"),
        ("robocasa", "robocasa", "install its simulator, for which lerobot has no extra"),
    ],
)
def test_a_simulator_that_is_not_installed_is_named_with_what_to_do(env_type, package, remedy):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed here")
    with pytest.raises(CraftError) as caught, ready(NOBODY, env_config(env_type, {}), 1):
        pass
    said = str(caught.value)
    assert said.startswith(f"the environment {env_type} cannot be made here (")
    assert package in said
    assert said.endswith(remedy)
    assert "\n" not in said


@pytest.mark.skipif(importlib.util.find_spec("libero") is not None, reason="LIBERO is installed here")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('input("Do you want to specify a custom path for the dataset folder? (Y/N): ")', "asks a question when it is"),
        ('open("no_such_directory/config.yaml")', "no_such_directory/config.yaml'). Install the simulator again"),
    ],
)
def test_libero_that_asks_or_lacks_a_file_is_a_sentence(body, words, tmp_path, monkeypatch):
    """A package that does at its import what LIBERO's does: it asks, and it reads its configuration."""
    (tmp_path / "libero" / "libero").mkdir(parents=True)
    (tmp_path / "libero" / "__init__.py").touch()
    (tmp_path / "libero" / "libero" / "__init__.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # of a job in the background
    try:
        with pytest.raises(CraftError) as caught, ready(NOBODY, env_config("libero", {}), 1):
            pass
    finally:
        sys.modules.pop("libero", None)
    said = str(caught.value)
    assert said.startswith("the environment libero cannot be made here: ")
    assert words in said
    assert "\n" not in said
