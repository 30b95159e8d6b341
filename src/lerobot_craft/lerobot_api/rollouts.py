"""Rollouts by lerobot's own evaluation, in this process: a loaded policy, an environment, success of each episode."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lerobot_craft.lerobot_api.policies import PolicyConfig, load_policy_config, quiet_loading
from lerobot_craft.lerobot_api.processors import Processor, load_processors
from lerobot_craft.lerobot_api.train_steps import undisturbed_rng


@dataclass(frozen=True)
class Player:
    """A policy that is ready to act, with the processors of its checkpoint."""

    policy: nn.Module
    preprocessor: Processor
    postprocessor: Processor
    config: PolicyConfig


def load_player(checkpoint: Path | str, env: Any, overrides: Sequence[str] = ("--device=cpu",)) -> Player:
    """The policy of a checkpoint directory, as `lerobot-eval` loads it; PEFT adapters included.

    Args:
        checkpoint: What `--policy.path` takes.
        env: Configuration of an environment that it will act in: lerobot takes the action's shape from there.
        overrides: Settings as on lerobot's command line without `policy.`.
    """
    from lerobot.policies import make_policy

    config = load_policy_config(checkpoint, overrides)
    with quiet_loading():
        policy = make_policy(cfg=config, env_cfg=env)
    return Player(policy.eval(), *load_processors(config), config)


def env_config(env_type: str, settings: Mapping[str, Any]) -> Any:
    """Configuration of a registered environment, as `--env.type` and `--env.x=y` make it."""
    from lerobot.envs import make_env_config

    return make_env_config(env_type, **settings)


def play(player: Player, env: Any, *, episodes: int, batch_size: int, seed: int) -> list[bool]:
    """Success of each episode in an environment with one task.

    Args:
        player: Who acts.
        env: Configuration of an environment with one task.
        episodes: How many; episode i starts from the state of `seed + i`.
        batch_size: How many are played side by side.
        seed: Of the first start state, and of the policy's own noise.
    """
    with ready(player, env, batch_size) as stages:
        (stage,) = stages.values()
        return stage.play(episodes, seed)


@dataclass(frozen=True)
class Stage:
    """One task of an environment, made ready for one player: what lerobot's rollouts take, by name."""

    parts: dict[str, Any]

    def play(self, episodes: int, seed: int) -> list[bool]:
        """Success of each episode, by lerobot's `eval_policy`: episode i starts from the state of `seed + i`."""
        from lerobot.scripts.lerobot_eval import eval_policy

        with seeded(seed):
            found = eval_policy(**self.parts, n_episodes=episodes, start_seed=seed)
        return [bool(episode["success"]) for episode in found["per_episode"]]


@contextmanager
def ready(player: Player, env: Any, side_by_side: int) -> Iterator[dict[str, Stage]]:
    """The tasks of an environment by name: the suite's name, with the task's number where a suite has several."""
    from lerobot.envs import close_envs, make_env, make_env_pre_post_processors

    before, after = make_env_pre_post_processors(env_cfg=env, policy_cfg=player.config)
    envs = make_env(env, n_envs=side_by_side, use_async_envs=False)
    common = {
        "policy": player.policy,
        "env_preprocessor": before,
        "env_postprocessor": after,
        "preprocessor": player.preprocessor,
        "postprocessor": player.postprocessor,
    }
    try:
        yield {
            suite if len(tasks) == 1 else f"{suite}/{number}": Stage({"env": vector, **common})
            for suite, tasks in envs.items()
            for number, vector in tasks.items()
        }
    finally:
        close_envs(envs)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """No gradients, and the policy's own noise drawn from `seed`; random generators are left as they were.

    Two policies of one kind then draw the same.
    """
    from lerobot.utils.random_utils import set_seed

    with torch.no_grad(), undisturbed_rng():
        set_seed(seed)
        yield
