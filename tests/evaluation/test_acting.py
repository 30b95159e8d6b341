import numpy as np
import pytest

from lerobot_craft.evaluation.acting import actions_under, take_frames
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.policies import adapter_for
from lerobot_craft.policies.taps import outputs_of
from tests.anchor_fixtures import OLD_TASKS


@pytest.mark.parametrize("policy", ["smolvla", "pi0_fast"])
def test_images_are_embedded_once_for_all_instructions(policy, teachers, anchor_data, monkeypatch):
    teacher = teachers(policy)
    dataset = open_dataset("local/new", anchor_data / "new", policy_config=teacher.config)
    frames = take_frames(teacher, dataset, 4, 2, seed=0)
    adapter = adapter_for(teacher.config)
    embedder = adapter.image_embedder(teacher.policy)
    with outputs_of(embedder.parts[1]) as seen:
        together = actions_under(teacher, frames, OLD_TASKS, seed=0)
    assert len(seen) == len(frames.batches) * len(teacher.config.image_features)

    monkeypatch.setattr(type(adapter), "image_embedder", lambda self, policy: None)
    with outputs_of(embedder.parts[1]) as seen:
        one_by_one = actions_under(teacher, frames, OLD_TASKS, seed=0)
    assert len(seen) == len(OLD_TASKS) * len(frames.batches) * len(teacher.config.image_features)
    assert np.array_equal(together, one_by_one)
