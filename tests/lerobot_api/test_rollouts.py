"""Environments that cannot be made: what really happens here, where their simulators are not installed."""

import importlib.util

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
