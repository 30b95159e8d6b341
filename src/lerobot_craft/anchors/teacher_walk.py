"""Runs a plan's walks: connects start frames, the teacher and `walk.py`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.cross import end_histories_at
from lerobot_craft.anchors.datasets import STATE, checked_stats, under_old_instructions
from lerobot_craft.anchors.motion import Motion, fit_motion
from lerobot_craft.anchors.plan import Plan
from lerobot_craft.anchors.walk import walk
from lerobot_craft.lerobot_api.datasets import RawBatch, frame_table
from lerobot_craft.lerobot_api.preload_columns import finite_numbers
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import mode
from lerobot_craft.teacher.load import Teacher, executed_chunk
from lerobot_craft.teacher.processors import normalizer_stats

ACTION = "action"


def walked_states(plan: Plan, teacher: Teacher, policy: Any, datasets: Sequence[Any], batch_size: int) -> Tensor | None:
    """States [walks, steps, S] of the plan's walks; None if it has none.

    Args:
        plan: The plan.
        teacher: Its processors, statistics and settings are used.
        policy: The teacher's network, in any mode.
        datasets: LeRobotDatasets in the plan's numbering.
        batch_size: Walks per forward pass.
    """
    if not plan.num_walks:
        return None
    groups = [_Group.of(plan, datasets, walks) for walks in _batches(plan, batch_size)]
    of_teacher = normalizer_stats(teacher.preprocessor).get(STATE)
    for group in groups:
        stats = checked_stats(group.frames.get(STATE), of_teacher)
    states = _in_order(groups, [_last(group.frames[STATE]) for group in groups])
    horizon = teacher.config.n_action_steps
    motion = _motion(datasets[plan.first_new :], horizon)

    def act(state: Tensor, step: int) -> Tensor:
        chunks = []
        for group in groups:
            frames = {**group.frames, STATE: end_histories_at(group.frames[STATE], state[group.walks])}
            batch = policy_batch(frames, datasets[group.dataset].meta.camera_keys, teacher.preprocessor)
            chunks.append(executed_chunk(teacher, policy, batch, (plan.seed, int(group.walks[0]), step))[:, :horizon])
        return _in_order(groups, chunks)

    drawn = plan.drawn[plan.walk_starts()].tolist()
    with mode(policy, train=False):
        return walk(states, drawn, plan.walk_steps, act, motion, stats, plan.seed)


@dataclass(frozen=True)
class _Group:
    """Walks that share a forward pass: those of one dataset have the same features."""

    walks: Tensor  # int64 [B]
    dataset: int
    frames: RawBatch  # the teacher's inputs at the start, under the old instructions

    @classmethod
    def of(cls, plan: Plan, datasets: Sequence[Any], walks: npt.NDArray[np.int64]) -> "_Group":
        starts = plan.walk_starts()[walks]
        dataset = int(plan.dataset[starts[0]])
        (raw,) = read_batches(datasets, [(dataset, plan.frame[starts])])
        return cls(torch.from_numpy(walks), dataset, under_old_instructions(raw, plan, starts))


def _batches(plan: Plan, batch_size: int) -> Iterator[npt.NDArray[np.int64]]:
    """Walks grouped by dataset, at most `batch_size` per group."""
    of_dataset = plan.dataset[plan.walk_starts()]
    for dataset in np.unique(of_dataset):
        walks = np.flatnonzero(of_dataset == dataset)
        for first in range(0, len(walks), batch_size):
            yield walks[first : first + batch_size]


def _in_order(groups: Sequence[_Group], parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the groups' parts in the order of the walks."""
    return torch.cat(list(parts))[torch.cat([group.walks for group in groups]).argsort()]


def _motion(datasets: Sequence[Any], horizon: int) -> Motion:
    """The motion model of all these datasets together."""
    episodes, first = [], 0
    for dataset in datasets:
        episode = frame_table(dataset).episode
        episodes.append(first + episode)
        first += int(episode.max()) + 1
    states, actions = (torch.cat([finite_numbers(dataset, name) for dataset in datasets]) for name in (STATE, ACTION))
    return fit_motion(states, actions, np.concatenate(episodes), horizon)


def _last(states: Tensor) -> Tensor:
    """The last state [B, S] of states [B, S] or histories [B, T, S]."""
    return (states if states.ndim == 2 else states[:, -1]).float()
