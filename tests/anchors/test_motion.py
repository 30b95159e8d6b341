import numpy as np
import pytest
import torch

from lerobot_craft.anchors.walks import _motion, fit_motion
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_dataset
from tests.faults.test_bad_input import poison

HORIZON = 4


def recorded(episodes=10, length=30, seed=0, absolute=False):
    """An arm of two joints that follows its actions; an object that stands until frame 15 and then moves with it."""
    rng = np.random.default_rng(seed)
    states, actions, episode = [], [], []
    for number in range(episodes):
        arm, thing = rng.normal(size=2), rng.normal(size=2)
        for t in range(length):
            action = np.sin(0.3 * t + rng.normal(size=2)) + 0.3 * rng.normal(size=2)
            states.append(np.r_[arm, thing])
            actions.append(action)
            episode.append(number)
            step = 0.5 * (action - arm) if absolute else 0.1 * action
            arm = arm + step
            thing = thing + (step if t >= 15 else 0)
    return torch.tensor(np.array(states)).float(), torch.tensor(np.array(actions)).float(), np.array(episode)


@pytest.mark.parametrize("absolute", [False, True], ids=["by how much", "to where"])
def test_the_arm_follows_and_the_object_is_not_asked(absolute):
    motion = fit_motion(*recorded(absolute=absolute), horizon=HORIZON)
    assert motion.driven.tolist() == [True, True, False, False]
    states, actions, episode = recorded(seed=1, absolute=absolute)
    rows = np.flatnonzero(episode[:-HORIZON] == episode[HORIZON:])
    chunks = torch.stack([actions[rows + ahead] for ahead in range(HORIZON)], dim=1)
    after = motion.after(states[rows], chunks)
    moved = states[rows + HORIZON] - states[rows]
    error = after - states[rows + HORIZON]
    assert error[:, :2].square().mean() < 0.02 * moved[:, :2].square().mean()
    assert torch.equal(after[:, 2:], states[rows][:, 2:])


def test_no_chunk_reaches_into_the_next_episode():
    states, actions, episode = recorded(episodes=40, length=HORIZON + 1)
    states[episode % 2 == 1, :2] += 5.0  # a chunk across the border would see a jump
    motion = fit_motion(states, actions, episode, HORIZON)
    assert float(motion.weights.abs().max()) < 1.0


def test_episodes_shorter_than_a_chunk_are_refused():
    with pytest.raises(CraftError, match="no episode of the new data is longer than the 30 actions"):
        fit_motion(*recorded(length=30), horizon=30)


def test_a_state_that_does_not_follow_is_refused():
    states, actions, episode = recorded()
    with pytest.raises(CraftError, match="no dimension of the new data's"):
        fit_motion(torch.randn(states.shape, generator=torch.Generator().manual_seed(0)), actions, episode, HORIZON)


@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_a_value_that_is_no_number_is_named_by_its_frame(anchor_data, tmp_path, name):
    poisoned = poison(anchor_data / "new", tmp_path / "poisoned", episode=1, frame=3, name=name)
    dataset = open_dataset("local/new", poisoned)
    with pytest.raises(CraftError, match=rf"{name} of local/new is NaN or infinite in frame 3 of episode 1: "):
        _motion([dataset], 2)
