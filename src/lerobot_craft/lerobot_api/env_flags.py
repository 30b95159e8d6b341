"""Flags of an evaluation and of `craft remember`, in lerobot's words: which environment, dataset, episodes."""

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


@dataclass
class ChosenDataset:
    """Behind `--dataset.`."""

    # Its name, such as lerobot/pusht. May be left out where a directory is given.
    repo_id: str = ""
    # Its directory on this machine, also one that `lerobot-eval --eval.recording=true` or `lerobot-rollout` wrote.
    root: str = ""
    revision: str | None = None
    # Only these episodes, as [0, 1, 2]. Unset: all.
    episodes: list[int] | None = None


@dataclass
class RememberFlags:
    """What `craft remember` takes frames from, and how many."""

    # Frames of a LeRobotDataset: old demonstrations, or recorded rollouts.
    dataset: ChosenDataset = field(default_factory=ChosenDataset)
    # Or of the policy's own rollouts: --env.type and its settings.
    env: envs.EnvConfig | None = None
    # Observations that the dataset or the environment names otherwise than the policy: {"its name": "policy's name"}.
    rename_map: dict[str, str] = field(default_factory=dict)
    # Rollouts of each task of the environment.
    episodes: int = 3
    # Leave out episodes that are known to have failed. Default: they are kept.
    successful_only: bool = False
    # Frames of each task, at most, spread over its episodes and phases.
    frames_per_task: int = 100
    # Bytes of all frames. The newest tasks are thinned first.
    max_bytes: int = 67108864
    # Of the choice of frames, of the first start state and of the policy's noise.
    seed: int = 0
