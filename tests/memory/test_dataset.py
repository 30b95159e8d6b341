import dataclasses

import pytest
import torch

from lerobot_craft.anchors.build import OldFrames, Ranks, build_cache, prepare
from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.errors import CraftError
from lerobot_craft.memory.dataset import MemoryDataset, as_old_data
from tests.anchor_fixtures import OLD_TASKS


def built(config, teacher, memory=None):
    job = prepare(config, teacher, memory)
    build_cache(job, config.output_dir, ranks=Ranks())
    return AnchorStore.open(config.output_dir)


def rows_by_frame(store, frames):
    """Columns of a cache ordered by the frame in the original dataset."""
    columns = store.take(torch.arange(len(store)))
    return {frames(int(frame)): row for row, frame in enumerate(columns["frame"].tolist())}, columns


@pytest.mark.parametrize("policy_type", ["smolvla", "act", "pi0_fast", "diffusion"])
def test_a_memory_gives_the_anchors_of_the_dataset(memories, teachers, anchor_data, tmp_path, policy_type):
    """All frames of one task, remembered, and the same frames of the dataset: the same values and scales."""
    teacher = teachers(policy_type)
    memory = memories(policy_type, frames_per_task=1000, only=(OLD_TASKS[2],))
    old = DatasetFlags("local/old", str(anchor_data / "old"))
    settings = {"num_anchors": len(memory), "anchor_source": "dataset", "num_draws": 1, "batch_size": 1}
    direct = built(
        BuildConfig(output_dir=tmp_path / "direct", old_dataset=old, old_instructions=OLD_TASKS[2], **settings), teacher
    )
    through = built(
        BuildConfig(output_dir=tmp_path / "through", **settings),
        teacher,
        OldFrames(as_old_data(memory, teacher.config), [OLD_TASKS[2]]),
    )
    assert through.manifest.counts == direct.manifest.counts
    frames = memory.dense("frame").tolist()
    found, columns = rows_by_frame(through, lambda row: frames[row])
    expected, wanted = rows_by_frame(direct, lambda frame: frame)
    assert found.keys() == expected.keys()
    for name in ("input.observation.state", "input.observation.images.top"):
        for frame, row in expected.items():
            assert torch.equal(cell(columns[name], found[frame]), cell(wanted[name], row))
    if policy_type == "act":  # draws nothing: its values and its own error are a function of the frame
        for frame, row in expected.items():
            for name in [name for name in wanted if name.startswith(("target", "own_error"))]:
                assert torch.equal(cell(columns[name], found[frame]), cell(wanted[name], row)), name
        (scale,), (other,) = through.manifest.scales, direct.manifest.scales
        assert (scale.source, scale.n) == (other.source, other.n) == ("demonstrations", len(memory))
        assert scale.values == pytest.approx(other.values)


def cell(column, row):
    return column.rows()[row] if isinstance(column, Ragged) else column[row]


def test_both_takes_all_of_the_memory_and_then_cross_anchors(memories, teachers, anchor_data, tmp_path):
    memory, teacher = memories("smolvla"), teachers("smolvla")
    new = DatasetFlags("local/new", str(anchor_data / "new"))
    config = BuildConfig(
        output_dir=tmp_path / "cache",
        new_dataset=new,
        num_anchors=15 + 12,
        old_frames=15,
        walked_states=0.0,
        drawn_states=0.0,
    )
    job = prepare(config, teacher, OldFrames(as_old_data(memory, teacher.config), memory.instructions))
    assert job.plan.source == "both"
    assert sorted(job.plan.frame[~job.plan.cross].tolist()) == list(range(15))
    assert job.plan.cross.sum() == 12


def test_the_memory_comes_before_an_old_dataset(memories, teachers, anchor_data, tmp_path):
    memory, teacher = memories("smolvla"), teachers("smolvla")
    old = DatasetFlags("local/old", str(anchor_data / "old"))
    config = BuildConfig(output_dir=tmp_path / "cache", old_dataset=old, num_anchors=20, anchor_source="dataset")
    job = prepare(config, teacher, OldFrames(as_old_data(memory, teacher.config), memory.instructions))
    assert sorted(job.plan.frame[job.plan.dataset == 0].tolist()) == list(range(15))
    assert (job.plan.dataset == 1).sum() == 5


def test_another_chunk_size_is_refused(memories, teachers):
    config = dataclasses.replace(teachers("act").config, chunk_size=4, n_action_steps=4)
    with pytest.raises(CraftError, match=r"chunks of .* actions and this policy predicts 4"):
        MemoryDataset(memories("act"), config)


def test_another_history_is_refused(memories, teachers):
    config = dataclasses.replace(teachers("diffusion").config, n_obs_steps=3)
    with pytest.raises(CraftError, match="steps and this policy reads 3"):
        MemoryDataset(memories("diffusion"), config)


def test_another_policy_type_is_refused(memories, teachers):
    with pytest.raises(CraftError, match="memory is of a smolvla and this policy is a act"):
        MemoryDataset(memories("smolvla"), teachers("act").config)
