import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from lerobot.envs import make_env, make_env_config, preprocess_observation

from tests.tiny.reach_env import CORNERS, ReachEnv


def walk(env, heading, seed=0):
    """Go in one direction until the episode ends; the steps it took, and the last step's results."""
    env.reset(seed=seed)
    for taken in range(1, 100):
        _, _, terminated, truncated, info = env.step(np.asarray(heading, np.float32))
        if terminated or truncated:
            return taken, terminated, info
    raise AssertionError("the episode has no end")


@pytest.fixture
def red():
    """The environment as lerobot builds it, without the vector around it."""
    (vector,) = make_env(make_env_config("reach", task="red"))["red"].values()
    yield vector.envs[0]
    vector.close()


def test_gymnasium_accepts_it():
    env = gym.wrappers.PassiveEnvChecker(ReachEnv("red"))
    walk(env, (0.2, 0.2))
    check_env(ReachEnv("red"), skip_render_check=True)


@pytest.mark.parametrize("seed", range(5))
def test_the_corner_that_is_named_is_a_success(red, seed):
    taken, terminated, info = walk(red, (0.15, 0.15), seed)
    assert taken < 15
    assert terminated
    assert info["is_success"]


@pytest.mark.parametrize("other", ["green", "blue", "yellow"])
def test_another_corner_is_none_and_the_episode_ends_after_15_steps(red, other):
    assert walk(red, np.array(CORNERS[other]) * 0.15) == (15, False, {"is_success": False})


def test_a_step_is_no_longer_than_allowed(red):
    before, _ = red.reset(seed=0)
    after, *_ = red.step(np.array([9, -0.1], np.float32))
    np.testing.assert_allclose(after["agent_pos"] - before["agent_pos"], [0.2, -0.1], atol=1e-6)


def test_the_picture_shows_where_the_point_is(red):
    observation, _ = red.reset(seed=0)
    for heading in ((0.2, 0.2), (0, -0.2), (-0.2, 0)):
        for _ in range(3):
            observation, *_ = red.step(np.array(heading, np.float32))
        rows, columns = np.nonzero((observation["pixels"]["top"] == 255).all(-1))
        seen = np.array([columns.mean(), 31 - rows.mean()]) / 31 * 2 - 1
        np.testing.assert_allclose(seen, observation["agent_pos"] * 28 / 31, atol=1 / 14)


def test_lerobot_reads_its_observations_and_instructions():
    environments = make_env(make_env_config("reach", task="red,blue"), n_envs=2)
    assert list(environments) == ["red", "blue"]
    for target, tasks in environments.items():
        observation, _ = tasks[0].reset(seed=[1, 2])
        shapes = {name: tuple(value.shape) for name, value in preprocess_observation(observation).items()}
        assert shapes == {"observation.images.top": (2, 3, 32, 32), "observation.state": (2, 2)}
        assert tasks[0].call("task_description") == (f"reach the {target} corner",) * 2
        tasks[0].close()
