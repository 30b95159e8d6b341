"""Flags of `craft remember`, in lerobot's words: which dataset or which environment."""

from dataclasses import dataclass, field

from lerobot import envs


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
