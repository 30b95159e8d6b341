import json
import os
import subprocess
import sys

import draccus
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from lerobot.envs import EnvConfig, make_env, make_env_config, preprocess_observation
from lerobot.envs.utils import NEW_ROLLOUT_OPTION

from lerobot_craft.bench.metaworld.configuration import CraftMetaWorldConfig
from lerobot_craft.bench.metaworld.environment import MetaWorldEnv
from lerobot_craft.bench.metaworld.tasks import find_task


@pytest.fixture
def vectors():
    """Function from settings to the vector environments that lerobot builds, by task."""
    made = []

    def make(n_envs=1, **settings):
        environments = make_env(make_env_config("craft_metaworld", **settings), n_envs=n_envs)
        made.extend(tasks[0] for tasks in environments.values())
        return {name: tasks[0] for name, tasks in environments.items()}

    yield make
    for vector in made:
        vector.close()


def start(vector, seeds):
    """As lerobot's rollout starts episodes."""
    return vector.reset(seed=seeds, options={NEW_ROLLOUT_OPTION: True})[0]


def test_gymnasium_accepts_it():
    check_env(MetaWorldEnv("drawer-close"), skip_render_check=True)


def test_the_expert_succeeds_in_the_environment_that_lerobot_builds(vectors):
    (vector,) = vectors(n_envs=2, task="drawer-close").values()
    start(vector, [1, 2])
    seen = []
    for _ in range(find_task("drawer-close").max_steps):
        *_, info = vector.step(np.stack(vector.call("expert")))
        if "final_info" in info:
            seen.append(info["final_info"]["is_success"] & info["_final_info"])
    assert np.any(seen, axis=0).tolist() == [True, True]


def test_an_episode_without_success_ends_at_the_tasks_limit(vectors):
    (vector,) = vectors(task="drawer-close").values()
    assert vector.call("_max_episode_steps") == (50,)
    start(vector, [1])
    still = np.zeros((1, 4), np.float32)
    ended = [vector.step(still)[2:4] for _ in range(50)]
    assert [bool(terminated[0]) for terminated, _ in ended] == [False] * 50
    assert [bool(truncated[0]) for _, truncated in ended] == [False] * 49 + [True]


def test_the_limit_can_be_set(vectors):
    (vector,) = vectors(task="drawer-close", episode_length=7).values()
    assert vector.call("_max_episode_steps") == (7,)


@pytest.mark.parametrize(("view", "side", "numbers"), [("told", 16, 7), ("seen", 64, 4)])
def test_lerobot_reads_its_observations_and_instructions(vectors, view, side, numbers):
    environments = vectors(n_envs=2, task="faucet-open, faucet-close", view=view)
    assert list(environments) == ["faucet-open", "faucet-close"]
    starts = []
    for name, vector in environments.items():
        observation = preprocess_observation(start(vector, [1, 2]))
        shapes = {key: tuple(value.shape) for key, value in observation.items()}
        assert shapes == {"observation.images.top": (2, 3, side, side), "observation.state": (2, numbers)}
        assert vector.call("task_description") == (find_task(name).instruction,) * 2
        starts.append(observation)
    for name, values in starts[0].items():
        np.testing.assert_array_equal(values, starts[1][name])


def test_the_state_is_that_of_lerobots_own_metaworld_environment():
    from lerobot.envs.metaworld import MetaworldEnv

    lerobots = MetaworldEnv("drawer-close-v3", obs_type="pixels_agent_pos")
    (numbers,) = lerobots.observation_space["agent_pos"].shape
    assert MetaWorldEnv("drawer-close", "seen").observation_space["agent_pos"].shape == (numbers,)


@pytest.mark.parametrize(
    ("settings", "sees"),
    [({"view": "told"}, False), ({"view": "seen"}, True), ({"view": "seen", "blindfold": True}, False)],
)
def test_the_camera_is_black_for_those_who_are_told_or_blindfolded(vectors, settings, sees):
    (vector,) = vectors(task="drawer-close", **settings).values()
    assert start(vector, [0])["pixels"]["top"].any() == sees
    assert vector.call("render")[0].shape == (240, 240, 3)


def test_between_two_looks_the_last_picture_stays():
    rare, always = MetaWorldEnv("drawer-close", "seen", look_every=4), MetaWorldEnv("drawer-close", "seen")
    for env in (rare, always):
        env.reset(seed=0)
    for step in range(1, 9):
        action = always.expert()
        seldom, often = (env.step(action)[0] for env in (rare, always))
        np.testing.assert_array_equal(seldom["agent_pos"], often["agent_pos"])
        same = np.array_equal(seldom["pixels"]["top"], often["pixels"]["top"])
        assert same == (step % 4 == 0)
        np.testing.assert_array_equal(rare.look(), seldom["pixels"]["top"])


def test_unseeded_episodes_start_in_different_places():
    env = MetaWorldEnv("faucet-open")
    env.reset(seed=0)
    states = [env.reset()[0]["agent_pos"] for _ in range(3)]
    assert len(np.unique(states, axis=0)) == 3


def test_the_configuration_survives_a_file():
    config = CraftMetaWorldConfig(task="dial-turn", view="seen", blindfold=True, look_every=8)
    assert draccus.decode(EnvConfig, json.loads(json.dumps(draccus.encode(config, EnvConfig)))) == config
    assert config.features["pixels/top"].shape == (64, 64, 3)


@pytest.mark.slow  # a process that imports lerobot and plays two episodes
@pytest.mark.timeout(600)
def test_stock_lerobot_eval_plays_it(tmp_path):
    from lerobot.envs import env_to_policy_features

    from lerobot_craft.tiny.make import make_checkpoint

    features = env_to_policy_features(CraftMetaWorldConfig())
    # Statistics so narrow that the hand goes to the red target whatever the weights say.
    heading, width = np.array([-0.6, 0.6, -0.15, 0.0], np.float32), 0.01
    stats = {"action": (heading, width), "observation.state": (np.zeros(7, np.float32), 1.0)}
    policy = make_checkpoint(
        "smolvla",
        tmp_path / "policy",
        output_features={"action": features.pop("action")},
        input_features=features,
        dataset_stats={
            name: {"mean": mean, "std": np.full_like(mean, std), "min": mean - std, "max": mean + std}
            for name, (mean, std) in stats.items()
        },
        instructions=[find_task(name).instruction for name in ("reach-red", "reach-blue")],
        action_chunks=heading + width * np.random.default_rng(0).uniform(-1, 1, (20, 10, 4)),
    )
    command = [
        *(sys.executable, "-m", "lerobot.scripts.lerobot_eval", f"--policy.path={policy}", "--policy.device=cpu"),
        *("--env.discover_packages_path=lerobot_craft.bench.metaworld", "--env.type=craft_metaworld"),
        *("--env.task=reach-red,reach-blue", "--eval.n_episodes=1", "--eval.batch_size=1"),
        f"--output_dir={tmp_path / 'eval'}",
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    groups = json.loads((tmp_path / "eval" / "eval_info.json").read_text())["per_group"]
    assert {name: group["pc_success"] for name, group in groups.items()} == {"reach-red": 100, "reach-blue": 0}
