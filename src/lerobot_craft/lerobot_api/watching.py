"""One batch of rollouts in lerobot's own loop, with a callback."""

from collections.abc import Callable
from typing import Any

from lerobot_craft.lerobot_api.rollouts import Player, ready, seeded


def watch(player: Player, env: Any, *, episodes: int, seed: int, look: Callable[[Any], None]) -> list[int | None]:
    """Play episodes with a callback; returns each episode's steps to success, or None without success.

    The episodes equal those of `rollouts.play` with the same seed if it plays as many in parallel.

    Args:
        player: The policy.
        env: Config of an environment with one task.
        episodes: All played in parallel; episode i starts from the state of `seed + i`.
        seed: Seed of the first start state, and of the policy's noise.
        look: Called with the vector of environments at the start and after each step; finished ones do not change.
    """
    from lerobot.scripts.lerobot_eval import rollout

    with ready(player, env, episodes) as stages, seeded(seed):
        (stage,) = stages.values()
        played = rollout(**stage.parts, seeds=list(range(seed, seed + episodes)), render_callback=look)
    reached = played["success"].bool()  # [episodes, steps]
    return [int(steps.int().argmax()) + 1 if bool(steps.any()) else None for steps in reached]
