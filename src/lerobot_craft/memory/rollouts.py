"""Frames of the policy's own rollouts: the way to remember tasks whose data are lost, if the robot is not."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.rollouts import PlayedEpisode
from lerobot_craft.lerobot_api.stored_frames import FrameTable
from lerobot_craft.memory.collect import as_memory, choose
from lerobot_craft.memory.format import ACTION, IS_PAD, Memory, Source


def from_rollouts(
    episodes: Sequence[PlayedEpisode],
    config: Any,
    *,
    name: str,
    fps: float,
    frames_per_task: int,
    seed: int,
    rename_map: Mapping[str, str] | None = None,
    successful_only: bool = False,
) -> Memory:
    """A memory of played episodes, with the same number of frames per task.

    Args:
        episodes: Of one or more tasks, each with its instruction.
        config: The policy's config.
        name: Where they were played.
        fps: Frames per second.
        frames_per_task: Maximum per task.
        seed: Seed of the choice.
        rename_map: The environment's observation names -> the policy's.
        successful_only: Skip failed episodes.

    Raises:
        CraftError: No episode is left, or an observation that the policy reads is missing.
    """
    kept = [episode for episode in episodes if episode.success or not successful_only]
    if not kept:
        raise CraftError(
            f"none of the {len(episodes)} rollouts succeeded, so there is nothing to remember: leave out "
            "--successful_only, or play more with --episodes"
        )
    tasks = list(dict.fromkeys(episode.instruction for episode in kept))
    lengths = np.asarray([len(episode.actions) for episode in kept])
    number = np.repeat(np.arange(len(kept)), lengths)  # episode index of each frame
    position = np.concatenate([np.arange(length) for length in lengths])
    table = FrameTable(
        task=np.asarray([tasks.index(episode.instruction) for episode in kept])[number],
        episode=number,
        position=position,
        length=lengths[number],
    )
    rows = choose(table, np.arange(len(table)), frames_per_task, seed)
    frames = [sample(kept[number[row]], int(position[row]), config, rename_map or {}) for row in rows]
    batch = {name: torch.stack([frame[name] for frame in frames]) for name in frames[0]}
    places = {
        "instruction": table.task[rows],
        "frame": rows,
        "episode": table.episode[rows],
        "position": position[rows],
        "length": table.length[rows],
        "success": np.asarray([kept[index].success for index in number[rows]]),
    }
    source = Source(name, None, _fingerprint(kept), len(table), "rollouts", fps)
    return as_memory([batch], places, config, source, tasks, seed)


def sample(episode: PlayedEpisode, position: int, config: Any, rename_map: Mapping[str, str]) -> dict[str, Tensor]:
    """One frame as a dataset would give it for this policy: history, executed action chunk, padding."""
    named = {rename_map.get(name, name): values for name, values in episode.observations.items()}
    missing = [name for name in config.input_features if name not in named and "empty_camera" not in name]
    if missing:
        raise CraftError(
            f"the environment shows no {missing[0]}, which this {config.type} reads (it shows "
            f"{', '.join(sorted(episode.observations))}): translate its names with --rename_map"
        )
    last = len(episode.actions) - 1
    frame = {}
    for name in config.input_features:
        if name in named:
            past = config.observation_delta_indices
            frame[name] = named[name][position if past is None else _within(position, past, last)[0]]
    steps, is_pad = _within(position, config.action_delta_indices, last)
    return frame | {ACTION: episode.actions[steps], IS_PAD: is_pad}


def _within(position: int, deltas: Sequence[int], last: int) -> tuple[Tensor, Tensor]:
    """Steps [D] of an episode around a position, clamped to it, and which of them [D] were outside."""
    wanted = position + torch.tensor(list(deltas))
    return wanted.clamp(0, last), (wanted < 0) | (wanted > last)


def _fingerprint(episodes: Sequence[PlayedEpisode]) -> str:
    digest = hashlib.sha256()
    for episode in episodes:
        digest.update(episode.instruction.encode())
        digest.update(episode.actions.numpy().tobytes())
    return digest.hexdigest()
