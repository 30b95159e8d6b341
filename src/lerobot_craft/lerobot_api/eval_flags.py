"""Flags of an evaluation, in the words of `lerobot-eval`: which environment, how many episodes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draccus
from lerobot import envs


@dataclass
class Episodes:
    """Behind `--eval.`."""

    # For each task.
    n_episodes: int = 20
    # Played side by side. 0: all of them, up to 25.
    batch_size: int = 0


@dataclass
class EvalFlags:
    """What `craft eval` is asked for, beside the checkpoints and the policies' settings."""

    # --env.type and its settings; several tasks or suites in --env.task, with commas.
    env: envs.EnvConfig
    eval: Episodes = field(default_factory=Episodes)
    # Observations that the environment names otherwise than the policies, as {"environment's name": "policy's name"}.
    rename_map: dict[str, str] = field(default_factory=dict)
    # Of the first start state: episode i of every task and checkpoint starts from seed + i.
    seed: int = 1000
    # Gets evaluation.json and report.html.
    output_dir: Path = Path("outputs/eval")
    # Where checkpoints are the stages of a sequence: the tasks that the second, third, ... has learned, with commas.
    learned: str = ""
    # Write success before and after into the README.md of each checkpoint that `craft train` made.
    update_card: bool = False


def env_as_json(env: envs.EnvConfig) -> dict[str, Any]:
    """Type and settings of an environment, as plain values."""
    return {"type": env.type, **draccus.encode(env)}
