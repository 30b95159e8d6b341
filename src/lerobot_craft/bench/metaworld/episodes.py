"""Rollouts of the scripted experts as arrays: noisy movement, clean labels.

Actions are recorded clean and executed with noise, so that a policy learns to recover. Nothing here imports torch.
"""

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np

from lerobot_craft.bench.metaworld.simulation import FloatArray, Simulation, UInt8Array
from lerobot_craft.bench.metaworld.tasks import IMAGE_SIDES, View

_LOUDEST = 0.2  # largest noise std of an episode, in units of the longest step; drawn per episode
_MOVES = np.array([1.0, 1.0, 1.0, 0.0])  # no noise on the gripper
TAIL = 8  # frames after success, to teach the policy to stay there


@dataclass(frozen=True)
class Episode:
    """T frames of one attempt."""

    states: FloatArray  # [T, 7], seen [T, 4]
    actions: FloatArray  # [T, 4]
    images: UInt8Array | None  # [T, side, side, 3]; None: no pictures


def attempt(task: str, seed: int, number: int, view: View = "told") -> Episode | None:
    """One attempt, or None if the expert failed. It depends only on task, seed and number.

    Args:
        task: Its name in `TASKS`.
        seed: Seed of the recording.
        number: Number of the attempt.
        view: What is recorded; `told` has no pictures.
    """
    simulation = _simulation(task, view)
    # The task is part of the seed: an old task's frames must not start where the new task's do.
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), number])
    simulation.reset(int(rng.integers(2**31)))
    loudness = _LOUDEST * rng.uniform()
    states, actions, images = [], [], []
    end = None  # the last frame, once it is known
    for frame in range(simulation.task.max_steps + TAIL):
        action = simulation.expert()
        states.append(simulation.state())
        actions.append(action)
        if view == "seen":
            images.append(simulation.image(IMAGE_SIDES[view]))
        success = simulation.step(action + loudness * _MOVES * rng.standard_normal(len(_MOVES)))
        if success and end is None and frame < simulation.task.max_steps:
            end = frame + TAIL
        if frame == end:
            return Episode(np.stack(states), np.stack(actions), np.stack(images) if images else None)
    return None


def attempts(task: str, seed: int, numbers: range, view: View = "told") -> list[Episode | None]:
    """Several attempts, as one piece of work for a process."""
    return [attempt(task, seed, number, view) for number in numbers]


@cache
def _simulation(task: str, view: View) -> Simulation:
    return Simulation(task, view)
