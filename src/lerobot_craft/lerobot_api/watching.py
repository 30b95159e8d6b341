"""One batch of rollouts by lerobot's own loop, with somebody looking on."""

from collections.abc import Callable
from typing import Any

from lerobot_craft.lerobot_api.rollouts import Player, ready, seeded


def watch(player: Player, env: Any, *, episodes: int, seed: int, look: Callable[[Any], None]) -> list[int | None]:
    """The number of steps to success of each episode, None without success.

    The episodes are those of `rollouts.play` with the same seed, if that plays as many side by side: the policy's noise
    is drawn for the whole batch.

    Args:
        player: Who acts.
        env: Configuration of an environment with one task.
        episodes: All of them side by side; episode i starts from the state of `seed + i`.
        seed: Of the first start state, and of the policy's noise.
        look: Called with the vector of environments at the start and after each step. An environment whose episode has
            ended stays as it was then.
    """
    from lerobot.scripts.lerobot_eval import rollout

    with ready(player, env, episodes) as stages, seeded(seed):
        (stage,) = stages.values()
        played = rollout(**stage.parts, seeds=list(range(seed, seed + episodes)), render_callback=look)
    reached = played["success"].bool()  # [episodes, steps]
    return [int(steps.int().argmax()) + 1 if bool(steps.any()) else None for steps in reached]
