import numpy as np
import pytest
import torch

from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.metaworld.tasks import AIR
from lerobot_craft.lerobot_api.rollouts import Player, env_config, play, watch


@pytest.fixture(scope="module")
def player():
    """A policy that goes straight to the red target, at a speed that it draws anew for each episode of a batch."""
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.pretrained import PreTrainedPolicy

    class Reaches(PreTrainedPolicy):
        config_class, name = ACTConfig, "reaches"

        def reset(self):
            self.speed = None

        def select_action(self, observation):
            hand = observation["observation.state"][:, :3]  # [episodes, 3]
            if self.speed is None:
                self.speed = 12 * torch.rand(len(hand), 1)
            way = torch.tensor(AIR.markers[0].at) - hand
            return torch.cat((self.speed * way, torch.zeros(len(hand), 1)), dim=1).clamp(-1, 1)

        def get_optim_params(self): ...
        def forward(self, batch): ...
        def predict_action_chunk(self, batch): ...

    config = ACTConfig(device="cpu")
    return Player(Reaches(config), lambda observation: observation, lambda action: action, config)


@pytest.fixture(scope="module")
def env():
    import lerobot_craft.bench.metaworld.configuration  # noqa: F401  registers the environment

    return env_config("craft_metaworld", {"task": "reach-red"})


def test_it_sees_the_rollouts_of_the_evaluation(player, env):
    seen = []
    steps = watch(player, env, episodes=4, seed=500_000, look=lambda vector: seen.append(vector.num_envs))
    played = play(player, env, episodes=4, batch_size=4, seed=500_000)
    assert [step is not None for step in steps] == played
    assert True in played
    assert False in played
    assert seen == [4] * (50 + 1)  # the start, and every step of the slowest


def test_success_is_where_an_episode_stops(player, env):
    frozen = []
    steps = watch(player, env, episodes=4, seed=500_000, look=lambda v: frozen.append([e.is_frozen for e in v.envs]))
    for episode, step in enumerate(steps):
        if step is not None:
            assert not frozen[step - 1][episode]
            assert frozen[step][episode]


def test_episodes_start_where_those_of_the_evaluation_do(player, env):
    starts = []

    def look(vector):
        if not starts:
            starts.extend(one.unwrapped._simulation.state() for one in vector.envs)

    watch(player, env, episodes=2, seed=500_000, look=look)
    simulation = Simulation("reach-red")
    expected = [simulation.reset(seed) for seed in (500_000, 500_001)]
    assert (expected[0] != expected[1]).any()
    np.testing.assert_array_equal(starts, expected)
