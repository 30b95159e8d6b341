"""Frames that are only measured come from episodes that no step visits."""

import numpy as np
import pytest
import torch

from lerobot_craft.lerobot_api.datasets import FrameTable
from lerobot_craft.memory.collect import choose_in_task, kept_out
from lerobot_craft.memory.format import Memory, Source


def table_of(lengths):
    episode = np.repeat(np.arange(len(lengths)), lengths)
    position = np.concatenate([np.arange(length) for length in lengths])
    return FrameTable(np.zeros(len(episode), np.int64), episode, position, np.asarray(lengths)[episode])


def memory_of(episodes):
    """A memory of one task, with the episode of each frame."""
    columns = {
        "instruction": torch.zeros(len(episodes), dtype=torch.int32),
        "dataset": torch.zeros(len(episodes), dtype=torch.int32),
        "episode": torch.tensor(episodes),
    }
    return Memory("smolvla", {}, (Source("old", None, "0", 1, "rollouts", 10.0),), ("push",), columns)


@pytest.mark.parametrize(("lengths", "n"), [([70, 65, 60], 100), ([200, 20], 50), ([30] * 4, 99)])
def test_of_few_episodes_one_gives_only_what_is_measured(lengths, n):
    table = table_of(lengths)
    rows = choose_in_task(table, n, [0, 1])
    assert len(set(rows.tolist())) == n
    counts = np.bincount(table.episode[rows], minlength=len(lengths))
    measured = int(counts.argmin())
    assert counts[measured] == min(16, round(n / 5))
    apart = kept_out(memory_of(table.episode[rows].tolist()))
    assert np.array_equal(table.episode[rows] == measured, apart.numpy())


def test_of_many_episodes_whole_ones_are_kept_out():
    table = table_of([20] * 40)
    episode = table.episode[choose_in_task(table, 100, [0, 1])]
    apart = kept_out(memory_of(episode.tolist())).numpy()
    assert 13 <= apart.sum() <= 16
    assert not set(episode[apart]) & set(episode[~apart])


@pytest.mark.parametrize(("episodes", "measured"), [([0] * 20, 4), ([0, 0], 0), ([0, 1], 0), ([0, 0, 1], 1)])
def test_what_is_left_where_there_is_little(episodes, measured):
    assert int(kept_out(memory_of(episodes)).sum()) == measured


def test_a_beginning_of_the_order_has_frames_of_both():
    table = table_of([70, 65, 60])
    first = table.episode[choose_in_task(table, 100, [0, 1])[:20]]
    assert set(first.tolist()) == {0, 1, 2}
