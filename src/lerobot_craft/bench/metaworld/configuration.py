"""`--env.type=craft_metaworld`: its flags, its features and how lerobot builds it."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs import EnvConfig
from lerobot.envs.utils import FreezeAfterEpisodeEnd

from lerobot_craft.bench.metaworld.environment import CAMERA, MetaWorldEnv
from lerobot_craft.bench.metaworld.tasks import ACTION_DIM, FPS, IMAGE_SIDES, View, find_task, state_names


@EnvConfig.register_subclass("craft_metaworld")
@dataclass
class CraftMetaWorldConfig(EnvConfig):  # type: ignore[misc]  # lerobot is untyped here
    """Tasks are named in `task`, separated by commas; each is a task group of its own in eval_info.json.

    Attributes:
        view: `told`: the state has the object's position, and the camera is black. `seen`: the object is only in the
            camera's picture (64 px).
        blindfold: show a black picture in the view `seen` too: what can be done without looking?
        look_every: draw at every so many steps: the length of the policy's chunks, where it executes whole ones.
        episode_length: steps until an episode has failed; None takes each task's own.
    """

    task: str = "faucet-open,faucet-close"
    fps: int = FPS
    view: View = "told"
    blindfold: bool = False
    look_every: int = 1
    episode_length: int | None = None
    features: dict[str, PolicyFeature] = field(default_factory=dict)
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            "action": "action",
            "agent_pos": "observation.state",
            f"pixels/{CAMERA}": f"observation.images.{CAMERA}",
        }
    )

    def __post_init__(self) -> None:
        """Set the features according to the view."""
        side = IMAGE_SIDES[self.view]
        self.features = {
            "action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (len(state_names(self.view)),)),
            f"pixels/{CAMERA}": PolicyFeature(FeatureType.VISUAL, (side, side, 3)),
        }

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        """Arguments of every environment besides its task."""
        return {"view": self.view, "blindfold": self.blindfold, "look_every": self.look_every}

    def create_envs(
        self, n_envs: int, use_async_envs: bool = False
    ) -> dict[str, dict[int, gym.vector.VectorEnv[Any, Any, Any]]]:
        """One vector of environments per task, {task: {0: vector}}."""
        # lerobot's own default: the step that ends an episode also reports its success.
        settings: dict[str, Any] = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        vector: Any = gym.vector.SyncVectorEnv
        if use_async_envs and n_envs > 1:
            vector = gym.vector.AsyncVectorEnv
            settings["context"] = "forkserver"  # torch's threads do not survive a fork
        return {
            task: {0: vector([partial(self._make_one, task)] * n_envs, **settings)}
            for task in map(str.strip, self.task.split(","))
        }

    def _make_one(self, task: str) -> Any:
        length = self.episode_length or find_task(task, self.view).max_steps
        # A batch runs until its slowest episode ends; environments that ended earlier do no more work.
        return FreezeAfterEpisodeEnd(TimeLimit(MetaWorldEnv(task, **self.gym_kwargs), length))
