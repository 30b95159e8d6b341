"""Real datasets, written by lerobot itself."""

import pytest

from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.tiny.make import make_local_dataset

TASKS = ["open the drawer", "close the drawer"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_local_dataset(tmp_path_factory.mktemp("datasets") / "drawers", TASKS)


@pytest.fixture(scope="module")
def video_root(tmp_path_factory):
    return make_local_dataset(tmp_path_factory.mktemp("datasets") / "film", TASKS, 1, video=True, image_size=64)


@pytest.fixture(scope="module")
def config():
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

    return DiffusionConfig(n_obs_steps=2, horizon=8, n_action_steps=4, device="cpu")


@pytest.fixture(scope="module")
def dataset(root, config):
    return open_dataset("local/drawers", root, policy_config=config)
