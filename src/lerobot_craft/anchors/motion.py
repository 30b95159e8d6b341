"""How the robot's own state follows its actions, learned from the new task's demonstrations.

A least-squares model: s[t+h] - s[t] = W [a[t], ..., a[t+h-1], s[t], 1]. Joint and gripper positions are nearly linear
in the commands over one chunk; object positions are not, and are not modeled. A dimension that does not move at the
start of an episode, when nothing has been touched, is not the robot's.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.errors import CraftError

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
            " --walked_states=0."
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
            " episode begins. Set --walked_states=0."
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
