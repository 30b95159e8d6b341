"""Which frames are chosen, what is refused, and that measuring a loss leaves no trace."""

import numpy as np
import pytest
import torch

from lerobot_craft.cli.flags import spelled
from lerobot_craft.cli.train import flag_of
from lerobot_craft.errors import CraftError
from lerobot_craft.training.methods.demonstrations import (
    demonstration_loss,
    new_demonstrations,
    old_demonstrations,
    policy_features,
)
from tests.anchor_fixtures import NEW_TASKS, OLD_TASKS


def test_frames_are_spread_evenly_over_the_old_tasks(policy_context):
    frames = old_demonstrations(policy_context(), 12)
    tasks = [task for batch in frames.batches(5) for task in batch["task"]]
    assert {task: tasks.count(task) for task in OLD_TASKS} == dict.fromkeys(OLD_TASKS, 4)


def test_batches_hold_the_chosen_frames_as_lerobot_sees_them(policy_context):
    context = policy_context()
    frames = old_demonstrations(context, 7)
    batches = list(frames.batches(3))
    assert [len(batch["task"]) for batch in batches] == [3, 3, 1]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == frames.rows.tolist()
    assert batches[0]["action"].shape[1:] == (context.teacher.config.chunk_size, 4)
    dealt = [list(frames.batches(3, first, 2)) for first in (0, 1)]
    assert [len(part) for part in dealt] == [2, 1]
    assert torch.equal(dealt[1][0]["index"], batches[1]["index"])


def test_several_old_datasets_are_joined(policy_context, another_dataset):
    another_dataset("older")
    frames = old_demonstrations(policy_context(old=("old", "older")), 16)
    tasks = [task for batch in frames.batches(4) for task in batch["task"]]
    assert len(frames) == len(tasks) == 16
    assert tasks.count("wave") == 4


def test_the_last_frames_are_left_out_where_the_policy_leaves_them_out(policy_context, monkeypatch):
    context, dropped = policy_context("diffusion"), 5
    monkeypatch.setattr(context.teacher.config, "drop_n_last_frames", dropped)  # the tiny one leaves out none
    frames = old_demonstrations(context, 10_000)
    table = np.concatenate([batch["frame_index"].numpy() for batch in frames.batches(64)])
    episode = np.concatenate([batch["episode_index"].numpy() for batch in frames.batches(64)])
    lengths = np.asarray(frames.datasets[0].meta.episodes["length"])
    assert len(frames) == sum(lengths - dropped)
    assert (table < lengths[episode] - dropped).all()


def test_a_choice_is_known_by_its_digest(policy_context):
    digest = old_demonstrations(policy_context(), 9).digest()
    assert old_demonstrations(policy_context(), 9).digest() == digest
    assert old_demonstrations(policy_context(), 10).digest() != digest
    assert old_demonstrations(policy_context(train={"seed": 4}), 9).digest() != digest


def test_new_frames_are_of_the_new_task(policy_context):
    (batch,) = new_demonstrations(policy_context(), 3).batches(8)
    assert batch["task"] == NEW_TASKS * 3


def test_without_an_old_dataset_the_flag_is_named(policy_context):
    with pytest.raises(CraftError, match=r"--craft\.method=ewc needs .* --craft\.old_dataset\.repo_id"):
        old_demonstrations(policy_context(old=None, method="ewc"), 5)


def test_a_missing_dataset_is_named_by_its_flag(policy_context):
    with pytest.raises(CraftError, match=r"nowhere.*--craft\.old_dataset\.root") as refusal, spelled(flag_of):
        old_demonstrations(policy_context(old="nowhere"), 5)
    assert "--dataset." not in str(refusal.value)


def test_fewer_frames_than_tasks_are_refused_only_if_somebody_asked_for_them(policy_context):
    with pytest.raises(CraftError, match=r"--craft\.ewc_samples=2 is less than one frame for each of the 3 tasks"):
        old_demonstrations(policy_context(), 2, "craft.ewc_samples")
    assert len(old_demonstrations(policy_context(), 2)) == 3


def test_an_old_dataset_without_the_policys_camera_is_refused(policy_context, another_dataset):
    another_dataset("blind", cameras=("observation.images.side",))
    with pytest.raises(CraftError, match=r"local/blind has no observation\.images\.top, which the policy reads"):
        old_demonstrations(policy_context(old="blind"), 5)


def test_an_old_dataset_of_another_robot_is_refused(policy_context, another_dataset):
    another_dataset("wide", state_dim=6)
    with pytest.raises(CraftError, match="of another robot"):
        old_demonstrations(policy_context(old="wide"), 5)


def test_renamed_features_are_looked_for_by_their_name_in_the_dataset(policy_context):
    context = policy_context(train={"rename_map": {"observation.images.front": "observation.images.top"}})
    assert "observation.images.front" in policy_features(context)
    assert "observation.images.top" not in policy_features(context)
    assert "action" in policy_features(context)


def test_a_loss_depends_on_its_seed_only_and_leaves_no_trace(policy_context):
    context = policy_context()
    frames = old_demonstrations(context, 3)
    (raw,) = frames.batches(3)
    state = torch.get_rng_state()
    first = demonstration_loss(context, raw, frames.cameras, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert context.policy.training
    torch.randn(3)
    assert demonstration_loss(context, raw, frames.cameras, seed=1) == first
    assert demonstration_loss(context, raw, frames.cameras, seed=2) != first
    assert first.requires_grad
