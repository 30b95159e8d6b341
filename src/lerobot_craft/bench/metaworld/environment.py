"""The suite as a gymnasium environment; it only shares observation names with lerobot."""

from typing import Any

import gymnasium as gym
import numpy as np

from lerobot_craft.bench.metaworld.simulation import FloatArray, Simulation, UInt8Array
from lerobot_craft.bench.metaworld.tasks import ACTION_DIM, FPS, IMAGE_SIDES, View, state_names

CAMERA = "top"
_VIDEO_SIDE = 240  # pixels, for people
_ROOM = 10.0  # meters, larger than any movement; gymnasium requires bounds
_SEEDS = 2**31  # range of seeds for unseeded episodes


class MetaWorldEnv(gym.Env[dict[str, Any], FloatArray]):
    """One task; an episode ends with its first success.

    Args:
        task: Its name in `TASKS`.
        view: `told`: the object's position is in the state, and the camera is black. `seen`: it is only in the picture.
        blindfold: Show a black picture in the view `seen` too.
        look_every: Draw every n steps and repeat the last picture in between; the same for policies that only look
            then.

    Attributes:
        task: The name.
        task_description: The instruction; lerobot-eval reads both.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": FPS}  # noqa: RUF012 - gymnasium's name and type
    render_mode = "rgb_array"

    def __init__(self, task: str, view: View = "told", blindfold: bool = False, look_every: int = 1) -> None:
        self._simulation = Simulation(task, view)
        self.task, self.task_description = task, self._simulation.task.instruction
        self._draws, self._look_every = view == "seen" and not blindfold, look_every
        self._steps = 0
        self._picture: UInt8Array = np.zeros((IMAGE_SIDES[view], IMAGE_SIDES[view], 3), np.uint8)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTION_DIM,), np.float32)
        picture = gym.spaces.Box(0, 255, self._picture.shape, np.uint8)
        state = gym.spaces.Box(-_ROOM, _ROOM, (len(state_names(view)),), np.float32)
        self.observation_space = gym.spaces.Dict({"agent_pos": state, "pixels": gym.spaces.Dict({CAMERA: picture})})

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode; the same seed gives the same start in every task of a scene."""
        super().reset(seed=seed, options=options)
        self._steps = 0
        self._simulation.reset(int(self.np_random.integers(_SEEDS)) if seed is None else seed)
        return self._observation(), {"is_success": False}

    def step(self, action: FloatArray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """One control step; the reward is 1 for success, else 0."""
        success = self._simulation.step(action)
        self._steps += 1
        return self._observation(), float(success), success, False, {"is_success": success}

    def expert(self) -> FloatArray:
        """The scripted expert's action in the current state."""
        return self._simulation.expert()

    def render(self) -> UInt8Array:
        """A picture for people, with the arm, independent of what the policy sees."""
        return self._simulation.image(_VIDEO_SIDE, arm=True)

    def look(self) -> UInt8Array:
        """The picture last shown to the policy."""
        return self._picture

    def _observation(self) -> dict[str, Any]:
        if self._draws and self._steps % self._look_every == 0:
            self._picture = self._simulation.image(len(self._picture))
        return {"agent_pos": self._simulation.state(), "pixels": {CAMERA: self._picture.copy()}}
