"""Frames that were read once are not read again, as long as they fit."""

import numpy as np
import pytest
import torch

from lerobot_craft.anchors.build import OpenDataset, prepare
from lerobot_craft.anchors.recipe import DatasetFlags, DocumentsBuild
from lerobot_craft.errors import CraftError
from lerobot_craft.training import anchor_batches
from lerobot_craft.training.anchor_batches import FramesInMemory
from tests.training.anchor_contexts import OPEN_DATASET

TOP = "observation.images.top"


@pytest.fixture
def job(teachers, anchor_data, opened_once, monkeypatch, tmp_path):
    monkeypatch.setattr(OPEN_DATASET, opened_once)
    old, new = (DatasetFlags(f"local/{name}", str(anchor_data / name)) for name in ("old", "new"))
    config = DocumentsBuild(
        output_dir=tmp_path,
        old_dataset=old,
        new_dataset=new,
        num_anchors=12,
        anchor_source="both",
        retention_mode="action",
    )
    return prepare(config, teachers("smolvla"))


@pytest.fixture
def reads(monkeypatch):
    """How many frames each call read."""
    counted = []
    original = anchor_batches.read_batches

    def counting(datasets, batches, num_workers=0):
        counted.append(sum(len(frames) for _, frames in batches))
        return original(datasets, batches, num_workers)

    monkeypatch.setattr(anchor_batches, "read_batches", counting)
    return counted


def of_dataset(job, dataset):
    return np.flatnonzero(job.plan.dataset == dataset)


def test_a_frame_is_read_once(job, reads):
    frames = FramesInMemory(job)
    rows = of_dataset(job, 0)
    first = frames.read(rows[:4])
    again = frames.read(rows[[3, 0, 0]])
    assert reads == [4]
    assert torch.equal(again[TOP], first[TOP][[3, 0, 0]])
    assert again["task"] == [first["task"][place] for place in (3, 0, 0)]
    frames.read(rows[:6])
    assert reads == [4, 2]
    assert 0 < frames.bytes_at_most(12) < 2**20


def test_what_does_not_fit_is_read_each_time(job, reads):
    frames = FramesInMemory(job, kept_bytes=0)
    rows = of_dataset(job, 0)[:3]
    first, again = frames.read(rows), frames.read(rows)
    assert reads == [3, 3]
    assert torch.equal(first[TOP], again[TOP])
    assert frames.bytes_at_most(12) == 0


def test_cross_anchors_come_with_their_old_instruction_and_without_actions(job):
    frames = FramesInMemory(job)
    rows = of_dataset(job, 1)
    batch = frames.read(rows)
    assert batch["task"] == [job.plan.instructions[index] for index in job.plan.instruction[rows]]
    assert "action" not in batch
    assert "action" in frames.read(of_dataset(job, 0))


def test_datasets_whose_images_differ_are_refused(job, anchor_data, tmp_path, teachers):
    import dataclasses

    from lerobot_craft.lerobot_api.datasets import open_dataset
    from lerobot_craft.tiny.make import make_local_dataset

    make_local_dataset(tmp_path / "small", ["x"], image_size=32)
    small = open_dataset("local/small", tmp_path / "small", policy_config=teachers("smolvla").config)
    other = OpenDataset(small, "local/small", None, None, "")
    with pytest.raises(CraftError, match=r"local/old has the observations .* and local/small"):
        FramesInMemory(dataclasses.replace(job, datasets=[job.datasets[0], other]))
