"""Rollouts by lerobot's own evaluation, in this process: a loaded policy, an environment, success of each episode."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lerobot_craft.lerobot_api.policies import PolicyConfig, load_policy_config
from lerobot_craft.lerobot_api.processors import Processor, load_processors
from lerobot_craft.lerobot_api.train_steps import undisturbed_rng


@dataclass(frozen=True)
class Player:
    """A policy that is ready to act, with the processors of its checkpoint."""

    policy: nn.Module
    preprocessor: Processor
    postprocessor: Processor
    config: PolicyConfig


def load_player(checkpoint: Path | str, env: Any) -> Player:
    """The policy of a checkpoint directory, as `lerobot-eval` loads it; PEFT adapters included.

    Args:
        checkpoint: What `--policy.path` takes.
        env: Configuration of an environment that it will act in: lerobot takes the action's shape from there.
    """
    from lerobot.policies import make_policy

    config = load_policy_config(checkpoint, ["--device=cpu"])
    policy = make_policy(cfg=config, env_cfg=env)
    return Player(policy.eval(), *load_processors(config), config)


def env_config(env_type: str, settings: Mapping[str, Any]) -> Any:
    """Configuration of a registered environment, as `--env.type` and `--env.x=y` make it."""
    from lerobot.envs import make_env_config

    return make_env_config(env_type, **settings)


def play(player: Player, env: Any, *, episodes: int, batch_size: int, seed: int) -> list[bool]:
    """Success of each episode, by lerobot's `eval_policy`: episode i starts from the state of `seed + i`.

    The policy's own noise is seeded too, so that two policies of one kind draw the same. Random generators are left as
    they were.

    Args:
        player: Who acts.
        env: Configuration of an environment with one task.
        episodes: How many.
        batch_size: How many are played side by side.
        seed: Of the first start state.
    """
    from lerobot.scripts.lerobot_eval import eval_policy

    with ready(player, env, batch_size, seed) as parts:
        found = eval_policy(**parts, n_episodes=episodes, start_seed=seed)
    return [bool(episode["success"]) for episode in found["per_episode"]]


@contextmanager
def ready(player: Player, env: Any, side_by_side: int, seed: int) -> Iterator[dict[str, Any]]:
    """What lerobot's rollouts take, by name: environments, policy, processors; the policy's noise is seeded."""
    from lerobot.envs import close_envs, make_env, make_env_pre_post_processors
    from lerobot.utils.random_utils import set_seed

    before, after = make_env_pre_post_processors(env_cfg=env, policy_cfg=player.config)
    envs = make_env(env, n_envs=side_by_side, use_async_envs=False)
    try:
        ((_, of_suite),) = envs.items()
        ((_, vector),) = of_suite.items()
        with torch.no_grad(), undisturbed_rng():
            set_seed(seed)
            yield {
                "env": vector,
                "policy": player.policy,
                "env_preprocessor": before,
                "env_postprocessor": after,
                "preprocessor": player.preprocessor,
                "postprocessor": player.postprocessor,
            }
    finally:
        close_envs(envs)
