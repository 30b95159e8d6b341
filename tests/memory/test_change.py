import numpy as np
import pytest
import torch

from lerobot_craft.errors import CraftError
from lerobot_craft.memory.change import extended, forgotten, thinned
from lerobot_craft.memory.collect import from_dataset
from tests.anchor_fixtures import OLD_TASKS

PLENTY = {"frames_per_task": 100, "max_bytes": 2**26}


def frames_of(memory):
    return sorted(zip(memory.dense("instruction").tolist(), memory.dense("frame").tolist(), strict=True))


def test_the_first_memory_is_what_was_added(memories):
    assert frames_of(extended(None, memories("smolvla"), **PLENTY)) == frames_of(memories("smolvla"))


def test_a_task_that_comes_again_gets_frames_of_both(memories):
    first, second = memories("smolvla", seed=0), memories("smolvla", seed=1)
    both = extended(first, second, **PLENTY)
    assert set(frames_of(both)) == set(frames_of(first)) | set(frames_of(second))
    assert both.instructions == first.instructions
    assert len(both.sources) == 1  # the same dataset


def test_the_same_frames_again_change_nothing(memories):
    again = extended(memories("smolvla"), memories("smolvla"), **PLENTY)
    assert frames_of(again) == frames_of(memories("smolvla"))


def test_a_task_that_comes_again_keeps_its_number_of_frames_over_all_episodes(memories):
    first, second = memories("smolvla", seed=0), memories("smolvla", seed=1)
    both = extended(first, second, frames_per_task=5, max_bytes=2**26)
    assert both.counts() == [5, 5, 5]
    for instruction in both.instructions:
        rows = both.rows_of(instruction)
        assert len(both.dense("episode")[rows].unique()) == 3


def test_old_tasks_come_first(memories):
    press = memories("smolvla", only=(OLD_TASKS[2],))
    opened = memories("smolvla", only=(OLD_TASKS[0],))
    assert extended(press, opened, **PLENTY).instructions == (OLD_TASKS[2], OLD_TASKS[0])


def test_forgetting(memories):
    memory = memories("smolvla")
    left = forgotten(memory, OLD_TASKS[1])
    assert left.instructions == (OLD_TASKS[0], OLD_TASKS[2])
    assert left.counts() == [5, 5]
    assert forgotten(memories("smolvla", only=(OLD_TASKS[0],)), OLD_TASKS[0]) is None


def test_forgetting_what_is_not_there_names_what_was_meant(memories):
    with pytest.raises(CraftError, match=f"did you mean '{OLD_TASKS[0]}'"):
        forgotten(memories("smolvla"), "open the drawers")
    with pytest.raises(CraftError, match="known are 'open the drawer';"):
        forgotten(memories("smolvla"), "xyz")


def test_the_newest_task_is_thinned_first_and_the_oldest_last(memories):
    memory = memories("smolvla")
    sizes = memory.row_bytes()
    one_too_much = thinned(memory, int(sizes.sum()) - 1)
    assert one_too_much.counts() == [5, 5, 4]
    half = thinned(memory, int(sizes.sum()) // 2)
    assert half.counts() == sorted(half.counts(), reverse=True)
    assert half.counts()[0] >= half.counts()[-1] >= 2
    assert half.nbytes <= memory.nbytes // 2


def test_thinning_keeps_the_beginning_which_is_spread_over_episodes(memories):
    memory = memories("smolvla")
    few = thinned(memory, memory.nbytes // 2)
    assert few.counts() == [3, 2, 2]
    for instruction, count in zip(few.instructions, few.counts(), strict=True):
        kept = few.dense("frame")[few.rows_of(instruction)]
        assert torch.equal(kept, memory.dense("frame")[memory.rows_of(instruction)][:count])
        assert len(few.dense("episode")[few.rows_of(instruction)].unique()) == count


def test_no_task_loses_its_last_frame(memories):
    memory = memories("smolvla")
    firsts = torch.tensor([int(memory.rows_of(task)[0]) for task in memory.instructions])
    fewest = int(memory.row_bytes()[firsts].sum())
    assert thinned(memory, fewest).counts() == [1, 1, 1]
    with pytest.raises(CraftError, match="--forget"):
        thinned(memory, fewest - 1)


def test_another_policy_type_is_refused(memories):
    with pytest.raises(CraftError, match="memory is of a smolvla and these frames are for a act"):
        extended(memories("smolvla"), memories("act"), **PLENTY)


def test_another_resolution_is_refused(memories, teachers, tmp_path):
    from lerobot_craft.lerobot_api.datasets import open_dataset
    from lerobot_craft.tiny.make import make_local_dataset

    make_local_dataset(tmp_path / "large", ["press it"], 1, 6, image_size=96)
    config = teachers("smolvla").config
    large = from_dataset(
        open_dataset("local/large", tmp_path / "large", policy_config=config),
        config,
        kind="demonstrations",
        frames_per_task=2,
        seed=0,
    )
    with pytest.raises(CraftError, match="64 x 64 pixels in the memory and 96 x 96 pixels in the new frames"):
        extended(memories("smolvla"), large, **PLENTY)


def test_every_beginning_of_a_task_is_spread_over_its_phases(memories):
    memory = memories("smolvla", frames_per_task=30)
    rows = memory.rows_of(OLD_TASKS[0])[:6]
    phase = memory.dense("position")[rows].numpy() / memory.dense("length")[rows].numpy()
    assert np.ptp(phase) > 0.4
