"""The environment itself; it knows gymnasium and nothing of lerobot but the names of its observations."""

import gymnasium as gym
import numpy as np

CORNERS = {"red": (1, 1), "green": (-1, 1), "blue": (1, -1), "yellow": (-1, -1)}  # (x, y); the box is [-1, 1] squared
COLOURS = {"red": (220, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 220), "yellow": (220, 220, 40)}
FURTHEST_STEP, CLOSE_ENOUGH = 0.2, 0.1
SIDE, SQUARE = 32, 4  # pixels


def instruction_for(target):
    return f"reach the {target} corner"


class ReachEnv(gym.Env):
    """A point that moves by the action and succeeds in the corner that the instruction names.

    The picture shows the point and all four corners, but not which of them counts: only the instruction says that.
    The reward is minus the distance.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 - gymnasium's name and type

    def __init__(self, target, render_mode="rgb_array"):
        self.task, self.task_description = target, instruction_for(target)  # lerobot-eval asks for these two
        self.render_mode = render_mode
        self.corner = np.array(CORNERS[target], np.float32)
        self.position = np.zeros(2, np.float32)
        self.action_space = gym.spaces.Box(-FURTHEST_STEP, FURTHEST_STEP, (2,), np.float32)
        picture = gym.spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        self.observation_space = gym.spaces.Dict(
            {"agent_pos": gym.spaces.Box(-1, 1, (2,), np.float32), "pixels": gym.spaces.Dict({"top": picture})}
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed, options=options)
        self.position = self.np_random.uniform(-0.2, 0.2, size=2).astype(np.float32)
        return self.observation(), {"is_success": False}

    def step(self, action):
        # A policy with random weights may ask for more than the point can do.
        moved = self.position + np.clip(action, -FURTHEST_STEP, FURTHEST_STEP)
        self.position = np.clip(moved, -1, 1).astype(np.float32)
        distance = float(np.linalg.norm(self.corner - self.position))
        success = distance < CLOSE_ENOUGH
        return self.observation(), -distance, success, False, {"is_success": success}

    def observation(self):
        return {"agent_pos": self.position.copy(), "pixels": {"top": self.render()}}

    def render(self):
        picture = np.zeros((SIDE, SIDE, 3), np.uint8)
        for name, corner in CORNERS.items():
            self.draw(picture, corner, COLOURS[name])
        self.draw(picture, self.position, (255, 255, 255))
        return picture

    @staticmethod
    def draw(picture, place, colour):
        x, y = np.rint((np.asarray(place) + 1) / 2 * (SIDE - SQUARE)).astype(int)
        row = SIDE - SQUARE - y  # y points up, rows go down
        picture[row : row + SQUARE, x : x + SQUARE] = colour
