"""What `--env.type=reach` stands for: its flags, its features and how lerobot builds it."""

from dataclasses import dataclass, field
from functools import partial

import gymnasium as gym
from gymnasium.wrappers import TimeLimit
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig

from tests.tiny.reach_env.environment import SIDE, ReachEnv


def make_one(target, episode_length):
    return TimeLimit(ReachEnv(target), episode_length)


@EnvConfig.register_subclass("reach")
@dataclass
class ReachEnvConfig(EnvConfig):
    """Targets are named in `task`, separated by commas; each is a task group of its own in eval_info.json."""

    task: str = "red"
    fps: int = 10
    episode_length: int = 15
    features: dict[str, PolicyFeature] = field(
        default_factory=lambda: {
            "action": PolicyFeature(FeatureType.ACTION, (2,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (2,)),
            "pixels/top": PolicyFeature(FeatureType.VISUAL, (SIDE, SIDE, 3)),
        }
    )
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            "action": "action",
            "agent_pos": "observation.state",
            "pixels/top": "observation.images.top",
        }
    )

    @property
    def gym_kwargs(self):
        return {"episode_length": self.episode_length}

    def create_envs(self, n_envs, use_async_envs=False):
        vector = gym.vector.AsyncVectorEnv if use_async_envs and n_envs > 1 else gym.vector.SyncVectorEnv
        # As in lerobot's own default: the step that ends an episode also reports its success.
        same_step = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        return {
            target: {0: vector([partial(make_one, target, **self.gym_kwargs)] * n_envs, **same_step)}
            for target in self.task.split(",")
        }
