"""A raw batch becomes the anchors that the plan asks for."""

import dataclasses

import numpy as np
import pytest
import torch

from lerobot_craft.anchors.observations import MadeStates, as_anchors
from lerobot_craft.anchors.plan import make_plan
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import FrameTable

OLD, NEW = "open the drawer", "turn the tap"
STATS = {"mean": torch.tensor([10.0, 20.0, 30.0]), "std": torch.ones(3), "count": torch.tensor([7])}


def source(name, frames=60):
    rows = np.arange(frames)
    return FrameTable(np.zeros(frames, np.int64), rows // 20, rows % 20, np.full(frames, 20)), [name]


def plan_of(**options):
    return make_plan("both", 40, 0, [source(OLD)], [source(NEW)], **options)


def batch_of(plan, anchors, steps=None):
    """What lerobot's DataLoader gives for these anchors, the state telling the frame."""
    frames = torch.from_numpy(plan.frame[anchors]).float()
    state = (
        frames[:, None].expand(-1, 3) if steps is None else frames[:, None, None] + torch.arange(steps)[:, None] / 10
    )
    return {
        "observation.images.top": torch.zeros(len(anchors), 3, 8, 8, dtype=torch.uint8),
        "observation.state": state.expand(*state.shape[:-1], 3).clone(),
        "observation.state_is_pad": torch.zeros(len(anchors), steps or 1, dtype=torch.bool),
        "action": torch.ones(len(anchors), 4, 2),
        "action_is_pad": torch.zeros(len(anchors), 4, dtype=torch.bool),
        "next.reward": torch.ones(len(anchors)),
        "task_index": torch.zeros(len(anchors), dtype=torch.int64),
        "task": [NEW if plan.cross[anchors[0]] else OLD] * len(anchors),
    }


def test_frames_of_old_datasets_pass_unchanged():
    plan = plan_of(drawn_states=0.5, state_jitter=0.1)
    anchors = np.flatnonzero(~plan.cross)
    batch = batch_of(plan, anchors)
    changed = as_anchors(batch, plan, anchors, STATS)
    assert changed == batch
    assert changed is not batch


def test_cross_anchors_get_the_old_instruction_and_keep_only_observations():
    plan = plan_of()
    anchors = np.flatnonzero(plan.cross)
    batch = batch_of(plan, anchors)
    changed = as_anchors(batch, plan, anchors)
    observed = ["observation.images.top", "observation.state", "observation.state_is_pad"]
    assert sorted(changed) == [*observed, "task"]
    assert changed["task"] == [OLD] * len(anchors)
    assert all(changed[key] is batch[key] for key in observed)
    assert batch["task"] == [NEW] * len(anchors), "the given batch stays as it is"


def test_drawn_states_come_from_the_statistics_and_the_others_stay():
    plan = plan_of(drawn_states=0.5)
    anchors = np.flatnonzero(plan.cross)
    batch = batch_of(plan, anchors)
    before = batch["observation.state"].clone()
    states = as_anchors(batch, plan, anchors, STATS)["observation.state"]
    drawn = torch.from_numpy(plan.drawn[anchors])
    assert torch.equal(states[~drawn], before[~drawn])
    assert ((states[drawn] - STATS["mean"]).abs() < 5).all()
    assert len(states[drawn].unique()) == 3 * int(drawn.sum()), "each anchor has its own"
    assert torch.equal(batch["observation.state"], before), "the given batch stays as it is"


def test_jitter_moves_what_is_not_drawn():
    plan = plan_of(drawn_states=0.5, state_jitter=0.01)
    anchors = np.flatnonzero(plan.cross)
    batch = batch_of(plan, anchors)
    moved = (as_anchors(batch, plan, anchors, STATS)["observation.state"] - batch["observation.state"]).abs()
    jittered = moved[torch.from_numpy(~plan.drawn[anchors])]
    assert (jittered > 0).all()
    assert (jittered < 0.06).all()


@pytest.mark.parametrize("steps", [None, 3])
def test_a_state_does_not_depend_on_its_batch(steps):
    plan = plan_of(drawn_states=0.5, state_jitter=0.1)
    anchors = np.flatnonzero(plan.cross)
    whole = as_anchors(batch_of(plan, anchors, steps), plan, anchors, STATS)["observation.state"]
    for part in (anchors[:1], anchors[3:9], anchors[::-1]):
        states = as_anchors(batch_of(plan, part, steps), plan, part, STATS)["observation.state"]
        assert torch.equal(states, whole[np.searchsorted(anchors, part)])


def test_a_drawn_history_ends_at_the_drawn_state():
    plan = plan_of(drawn_states=1.0)
    anchors = np.flatnonzero(plan.cross)
    single = as_anchors(batch_of(plan, anchors), plan, anchors, STATS)["observation.state"]
    history = as_anchors(batch_of(plan, anchors, steps=3), plan, anchors, STATS)["observation.state"]
    torch.testing.assert_close(history[:, -1], single)
    torch.testing.assert_close(history.diff(dim=1), torch.full((len(anchors), 2, 3), 0.1), atol=1e-4, rtol=0)


def near_plan():
    return plan_of(drawn_states=1.0, draw_from_old=True)


@pytest.mark.parametrize("steps", [None, 3])
def test_a_state_between_two_old_frames(steps):
    """Each frame's state is its number three times, so a state between two has three numbers between theirs."""
    plan = near_plan()
    anchors = np.flatnonzero(plan.mate >= 0)
    assert len(anchors) == 20
    made = MadeStates(mates=torch.from_numpy(plan.mate).float()[:, None].expand(-1, 3))
    batch = batch_of(plan, anchors, steps)
    asked = as_anchors(batch, plan, anchors, {"mean": STATS["mean"], "std": 1e-6 * STATS["std"]}, made)
    assert "action" not in asked
    moved = asked["observation.state"] - batch["observation.state"]
    if steps is not None:
        assert torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-4)  # a history moves as a whole
        moved = moved[:, -1]
    own = batch["observation.state"] if steps is None else batch["observation.state"][:, -1]
    way = made.mates[anchors] - own
    share = (moved / way)[way.abs() > 1]
    assert 0 <= float(share.min()) < 0.3
    assert 0.7 < float(share.max()) <= 1.001
    assert torch.allclose(moved, moved[:, :1].expand_as(moved), atol=1e-4)  # one share for all dimensions
    noisy = as_anchors(batch, plan, anchors, STATS, made)["observation.state"] - asked["observation.state"]
    assert float(noisy.std()) == pytest.approx(0.05, rel=0.5)


def test_mates_that_are_not_given_are_a_bug():
    plan = near_plan()
    anchors = np.flatnonzero(plan.mate >= 0)
    with pytest.raises(ValueError, match="the plan has mates, and their states are not given"):
        as_anchors(batch_of(plan, anchors), plan, anchors, STATS)


def test_old_frames_and_changed_ones_make_no_batch():
    plan = near_plan()
    anchors = np.flatnonzero(plan.dataset == 0)
    with pytest.raises(ValueError, match="of one dataset and one kind"):
        as_anchors(batch_of(plan, anchors), plan, anchors, STATS)


def test_another_seed_draws_other_states():
    plan = plan_of(drawn_states=1.0)
    anchors = np.flatnonzero(plan.cross)
    batch = batch_of(plan, anchors)
    other = dataclasses.replace(plan, seed=1)
    one, two = (as_anchors(batch, p, anchors, STATS)["observation.state"] for p in (plan, other))
    assert (one != two).all()


def test_a_dataset_that_changed_since_the_plan_is_refused():
    plan = plan_of()
    anchors = np.flatnonzero(~plan.cross)
    with pytest.raises(CraftError, match="it has changed since"):
        as_anchors({**batch_of(plan, anchors), "task": [NEW] * len(anchors)}, plan, anchors)


def test_missing_statistics_state_or_dimensions_are_refused():
    plan = plan_of(drawn_states=1.0)
    anchors = np.flatnonzero(plan.cross)
    batch = batch_of(plan, anchors)
    with pytest.raises(CraftError, match="teacher has no statistics"):
        as_anchors(batch, plan, anchors)
    with pytest.raises(CraftError, match="3 dimensions and the teacher's statistics have 2"):
        as_anchors(batch, plan, anchors, {"mean": torch.zeros(2), "std": torch.ones(2)})
    del batch["observation.state"]
    with pytest.raises(CraftError, match=r"dataset has no observation\.state"):
        as_anchors(batch, plan, anchors, STATS)


def test_a_batch_that_is_not_of_these_anchors_is_a_bug():
    plan = plan_of()
    anchors = np.flatnonzero(plan.cross)
    for wrong in (anchors[:-1], np.arange(len(anchors))):
        with pytest.raises(ValueError, match="all of one dataset"):
            as_anchors(batch_of(plan, anchors), plan, wrong)
