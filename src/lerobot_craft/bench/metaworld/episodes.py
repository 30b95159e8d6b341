"""What the scripted experts do, as arrays: noisy movement, clean labels.

The expert's actions are recorded as it would do them and executed with noise, so that a policy also learns the way
back. Nothing here loads torch: worker processes start quickly.
"""

import zlib
from dataclasses import dataclass
from functools import cache

import numpy as np

from lerobot_craft.bench.metaworld.simulation import FloatArray, Simulation, UInt8Array
from lerobot_craft.bench.metaworld.tasks import IMAGE_SIDES, View

_LOUDEST = (
    0.2  # standard deviation of the noise on a movement, in units of the longest step; each episode draws its own
)
_MOVES = np.array([1.0, 1.0, 1.0, 0.0])  # the gripper does as it is told
TAIL = 8  # frames after success: the policy is to stay there


@dataclass(frozen=True)
class Episode:
    """T frames of one attempt."""

    states: FloatArray  # [T, 7], seen [T, 4]
    actions: FloatArray  # [T, 4]
    images: UInt8Array | None  # [T, side, side, 3]; None: nothing was drawn


def attempt(task: str, seed: int, number: int, view: View = "told") -> Episode | None:
    """One attempt, or None where the expert failed. Task, seed and number decide it, not what ran before.

    Args:
        task: its name in `TASKS`.
        seed: of the recording.
        number: of the attempt.
        view: what is recorded: `told` without pictures.
    """
    simulation = _simulation(task, view)
    # Start states are drawn by task too: an old task's frames must not start where the new one's do.
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
