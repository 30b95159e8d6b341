"""Success of a policy, task by task, from the same start states for every policy."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from lerobot_craft.lerobot_api.rollouts import Player, play

_SIDE_BY_SIDE = 25  # environments; more take memory and are hardly faster


def success(
    player: Player, tasks: Sequence[str], env_of: Callable[[str], Any], *, episodes: int, seed: int
) -> dict[str, list[bool]]:
    """Success of each episode of each task.

    Args:
        player: From `lerobot_api.rollouts.load_player`.
        tasks: Names of tasks.
        env_of: Configuration of the environment with one of them.
        episodes: For each task; episode i starts from the state of `seed + i`.
        seed: Of the first start state, and of the policy's own noise.
    """
    batch_size = side_by_side(episodes)
    return {task: play(player, env_of(task), episodes=episodes, batch_size=batch_size, seed=seed) for task in tasks}


def side_by_side(episodes: int) -> int:
    """How many episodes are played at once: equal batches, so that hardly any is played for nothing."""
    return math.ceil(episodes / math.ceil(episodes / _SIDE_BY_SIDE))
