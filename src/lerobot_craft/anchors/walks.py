"""States of cross anchors that the teacher itself would reach: walks under old instructions, without a simulator.

A new frame under an old instruction asks the teacher only about where the new task happens, not about where the old
task would lead: turning a faucet the other way puts the hand on its other side. So the teacher walks. From the first
frame of a new episode (or from an old frame, see `plan.py`) it acts under the old instruction, a motion model
(below) moves the robot's own state, and each state on the way becomes an anchor. The rest of the state stays. It
may be drawn from the teacher's statistics at the start, to walk among objects that the new data do not show.

How the robot's own state follows its actions, learned from the new task's demonstrations.

A least-squares model: s[t+h] - s[t] = W [a[t], ..., a[t+h-1], s[t], 1]. Joint and gripper positions are nearly linear
in the commands over one chunk; object positions are not, and are not modeled. A dimension that does not move at the
start of an episode, when nothing has been touched, is not the robot's.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.observations import (
    STATE,
    MadeStates,
    Stats,
    anchor_generator,
    checked_stats,
    draw_states,
    end_histories_at,
    limits_of,
    spread_of,
    under_old_instructions,
)
from lerobot_craft.anchors.plan import Plan
from lerobot_craft.anchors.teacher import Teacher, executed_chunk, normalizer_stats
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.lerobot_api.datasets import RawBatch, frame_table
from lerobot_craft.lerobot_api.preload import finite_numbers, numbers
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import mode

type Floats = npt.NDArray[np.float64]
type Ints = npt.NDArray[np.int64]

_RIDGE = 1e-3  # relative to the features' scale; enough if the actions of a chunk repeat
_STANDS = 0.02  # of its standard deviation: a dimension that moves less at an episode's start is not the robot's own
_FOLLOWS = 0.6  # minimum explained share of the movement, on held-out episodes, for a driven dimension
_BETTER = 0.02  # the state is used if it explains this much more than the actions alone


@dataclass(frozen=True)
class Motion:
    """The fitted model.

    Attributes:
        weights: [h * A + S + 1, S]; zero for dimensions that are not driven.
        driven: bool [S], dimensions of the state that follow the actions.
    """

    weights: Tensor
    driven: Tensor

    def after(self, states: Tensor, actions: Tensor) -> Tensor:
        """States [B, S] after executing a chunk of actions [B, h, A]."""
        return states + _features(actions, states * self.driven) @ self.weights


def fit_motion(states: Tensor, actions: Tensor, episode: Ints, horizon: int) -> Motion:
    """Fit the motion model to a dataset's frames, in order.

    Args:
        states: [N, S].
        actions: [N, A], as recorded.
        episode: [N], the episode of each frame.
        horizon: h, actions executed between two looks at the state.

    Raises:
        CraftError: No episode is as long as a chunk, or no dimension of the state follows the actions.
    """
    starts = _starts(episode, horizon)
    if len(starts) == 0:
        raise CraftError(
            f"States cannot be walked: no episode of the new data is longer than the {horizon} actions of a chunk. Set"
            f" {setting('walked_states')}=0."
        )
    here = states[starts].double()
    moved = states[starts + horizon].double() - here  # [n, S]
    chunks = torch.stack([actions[starts + ahead] for ahead in range(horizon)], dim=1).double()  # [n, h, A]
    begins = torch.from_numpy(np.r_[True, episode[starts][1:] != episode[starts][:-1]])
    moves = moved[begins].square().mean(dim=0).sqrt() > _STANDS * here.std(dim=0)
    unseen = torch.from_numpy(episode[starts] % 5 == 4)
    if unseen.all() or not unseen.any():  # too few episodes to hold some out
        unseen = torch.zeros_like(unseen)
    fitted, judged = ~unseen, unseen if unseen.any() else ~unseen
    best, weights, driven = -math.inf, torch.empty(0), torch.zeros_like(moves)
    # The state helps if actions are absolute targets and misleads otherwise. Held-out episodes decide.
    for state in (here * 0, here * moves):
        features = _features(chunks, state)
        candidate = _least_squares(features[fitted], moved[fitted])
        explained = _explained(features[judged] @ candidate, moved[judged])
        if moves.any() and (quality := float(explained[moves].mean())) > best + _BETTER:
            best, weights, driven = quality, candidate, moves & (explained > _FOLLOWS)
    if not driven.any():
        raise CraftError(
            "States cannot be walked: no dimension of the new data's observation.state follows the actions when an"
            f" episode begins. Set {setting('walked_states')}=0."
        )
    return Motion((weights * driven).float(), driven)


def _starts(episode: Ints, horizon: int) -> Ints:
    """Frames followed by a whole chunk within their episode."""
    rows = np.arange(max(0, len(episode) - horizon))
    starts: Ints = rows[episode[rows] == episode[rows + horizon]]
    return starts


def _features(actions: Tensor, states: Tensor) -> Tensor:
    """Regression features: actions, states, 1; [B, h * A + S + 1]."""
    ones = torch.ones(len(states), 1, dtype=states.dtype)
    return torch.cat([actions.flatten(start_dim=1).to(states.dtype), states, ones], dim=1)


def _least_squares(features: Tensor, moved: Tensor) -> Tensor:
    gram = features.T @ features
    ridge = _RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weights: Tensor = torch.linalg.solve(gram + ridge, features.T @ moved)
    return weights


def _explained(predicted: Tensor, moved: Tensor) -> Tensor:
    """Explained share of the movement per dimension, [S]; at most 1."""
    return 1 - (moved - predicted).square().sum(dim=0) / moved.square().sum(dim=0).clamp_min(1e-30)


# (states [walks, S], step of the walk) -> the teacher's next actions [walks, h, A] as the robot executes them
Act = Callable[[Tensor, int], Tensor]

JITTER = 0.1  # in standard deviations per step, on driven dimensions: turns a walk into a tube
_STREAM = 2**40  # separates the walks' random numbers from those of the anchors


def walk(
    starts: Tensor, drawn: Sequence[bool], steps: int, act: Act, motion: Motion, stats: Stats, seed: int
) -> Tensor:
    """The states of every walk, [walks, steps, S], including the start.

    Args:
        starts: States [walks, S] of first frames.
        drawn: Per walk: resample the object's state from the statistics?
        steps: Chunks per walk.
        act: Asks the teacher.
        motion: Moves the robot's own state.
        stats: The teacher's statistics of the state.
        seed: Seed of draws and jitter.
    """
    generators = [anchor_generator(seed, _STREAM + number) for number in range(len(starts))]
    objects = torch.cat([draw_states(stats, 1, generator) for generator in generators]).to(starts.dtype)
    moved = torch.tensor(list(drawn))[:, None] & ~motion.driven
    state = torch.where(moved, objects, starts)
    low, high = limits_of(stats)
    spread = JITTER * spread_of(stats) * motion.driven
    walked = [state]
    for step in range(1, steps):
        state = motion.after(state, act(state, step - 1))
        noise = torch.cat([torch.randn(1, state.shape[1], generator=generator) for generator in generators])
        # Outside the teacher's data its own walk is meaningless, so clamp to it. Objects stay where they were put.
        state = torch.where(motion.driven, (state + spread * noise).clamp(low, high), state)
        walked.append(state)
    return torch.stack(walked, dim=1)


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


def make_states(plan: Plan, teacher: Teacher, policy: Any, datasets: Sequence[Any], batch_size: int) -> MadeStates:
    """Walk the plan's walks (see `walked_states`) and read the states of its mates."""
    walked = walked_states(plan, teacher, policy, datasets, batch_size)
    return MadeStates(walked, _mates(plan, datasets))


def _mates(plan: Plan, datasets: Sequence[Any]) -> Tensor | None:
    rows = np.flatnonzero(plan.mate >= 0)
    mates: Tensor | None = None
    for dataset in np.unique(plan.dataset[rows]):
        of_dataset = rows[plan.dataset[rows] == dataset]
        states = numbers(datasets[dataset], STATE)[plan.mate[of_dataset]].float().view(len(of_dataset), -1)
        mates = torch.zeros(len(plan), states.shape[1]) if mates is None else mates
        mates[of_dataset] = states
    return mates
