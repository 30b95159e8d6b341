"""Frames are chosen evenly over tasks, episodes and phases, by the seed alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lerobot_craft.anchors.plan import choose_frames, share_out, spread
from lerobot_craft.lerobot_api.datasets import FrameTable


def table_of(lengths_by_task):
    """A table with one episode per length, tasks in turn."""
    rows = [
        (task, task * 1000 + number, position, length)
        for task, lengths in enumerate(lengths_by_task)
        for number, length in enumerate(lengths)
        for position in range(length)
    ]
    return FrameTable(*np.array(rows, dtype=np.int64).reshape(-1, 4).T)


TABLES = st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=5), min_size=1, max_size=5).map(table_of)
SEEDS = st.integers(0, 2**40)


def assert_even(chosen_groups, all_groups):
    """Counts of groups that still had more to give differ by at most one, and no full one has more than those."""
    groups, capacities = np.unique(all_groups, return_counts=True)
    counts = np.array([(chosen_groups == group).sum() for group in groups])
    unfilled = counts[counts < capacities]
    if len(unfilled):
        assert unfilled.max() - unfilled.min() <= 1
        assert counts.max() - unfilled.min() <= 1


@given(TABLES, st.integers(0, 80), SEEDS)
def test_no_frame_twice_and_as_many_as_there_are(table, n, seed):
    frames = choose_frames(table, n, seed)
    assert frames.dtype == np.int64
    assert len(frames) == len(set(frames.tolist())) == min(n, len(table))


@given(TABLES, st.integers(1, 80), SEEDS)
def test_tasks_and_the_episodes_of_a_task_get_equal_parts(table, n, seed):
    frames = choose_frames(table, n, seed)
    assert_even(table.task[frames], table.task)
    for task in np.unique(table.task):
        own = frames[table.task[frames] == task]
        assert_even(table.episode[own], table.episode[table.task == task])


@given(st.integers(1, 12), st.integers(1, 6), st.integers(1, 40), SEEDS)
def test_every_stratum_of_the_movement_is_taken_once(tasks, episodes, per_task, seed):
    length = 40 * 25  # much finer than the strata
    table = table_of([[length] * episodes] * tasks)
    frames = choose_frames(table, per_task * tasks, seed)
    phases = table.position[frames] / length
    for task in range(tasks):
        own = np.sort(phases[table.task[frames] == task])
        # A place is rounded down to a frame, so it may fall one frame below its stratum.
        assert (np.floor((own + 1 / length) * per_task) >= np.arange(per_task)).all()
        assert (np.floor(own * per_task) <= np.arange(per_task)).all()


@given(st.integers(2, 5), st.integers(2, 5), SEEDS)
def test_each_episode_is_seen_from_its_beginning_to_its_end(episodes, each, seed):
    table = table_of([[100] * episodes])
    frames = choose_frames(table, episodes * each, seed)
    for episode in range(episodes):
        phases = np.sort(table.position[frames][table.episode[frames] == episode]) / 100
        # One slot in each of `each` parts; dealing strata may move it by the width of one part.
        assert (np.abs(phases - (np.arange(each) + 0.5) / each) <= 1.0 / each).all()


@given(st.integers(1, 5), st.integers(1, 6), SEEDS)
def test_every_beginning_is_balanced(tasks, rounds, seed):
    table = table_of([[30, 30]] * tasks)
    frames = choose_frames(table, tasks * rounds, seed)
    for end in range(len(frames) + 1):
        counts = np.bincount(table.task[frames[:end]], minlength=tasks)
        assert counts.max() - counts.min() <= 1


def test_phases_and_episodes_come_shuffled():
    table = table_of([[1000] * 4])
    frames = choose_frames(table, 400, 0)
    assert abs(np.corrcoef(np.arange(400), table.position[frames])[0, 1]) < 0.2
    rounds = table.episode[frames].reshape(100, 4)
    assert all(set(episodes) == {0, 1, 2, 3} for episodes in rounds.tolist())
    assert len({tuple(episodes) for episodes in rounds.tolist()}) > 10


def test_frames_follow_from_the_seed_and_not_from_numpys_global_state():
    table = table_of([[50, 60], [70]])
    np.random.seed(1)  # noqa: NPY002 (the global state is the point)
    first = choose_frames(table, 40, 7)
    np.random.seed(2)  # noqa: NPY002
    assert (choose_frames(table, 40, 7) == first).all()
    assert set(choose_frames(table, 40, 8).tolist()) != set(first.tolist())


def test_row_order_of_the_table_does_not_matter_to_the_spread():
    table = table_of([[20, 20], [20, 20]])
    mixed = np.random.default_rng(0).permutation(len(table))
    shuffled = FrameTable(table.task[mixed], table.episode[mixed], table.position[mixed], table.length[mixed])
    assert sorted(mixed[choose_frames(shuffled, 30, 3)].tolist()) == sorted(choose_frames(table, 30, 3).tolist())


def test_an_empty_table_gives_nothing():
    assert choose_frames(table_of([]), 5, 0).tolist() == []


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(0, 100), SEEDS)
def test_shares_are_equal_up_to_capacity(capacities, n, seed):
    capacities = np.array(capacities)
    parts = share_out(n, capacities, np.random.default_rng(seed))
    assert parts.sum() == min(n, capacities.sum())
    assert (parts <= capacities).all()
    if (parts < capacities).any():
        assert parts.max() - parts[parts < capacities].min() <= 1


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), SEEDS)
def test_groups_are_spread_and_keep_their_own_order(groups, seed):
    groups = np.array(groups)
    order = spread(groups, np.random.default_rng(seed))
    assert sorted(order.tolist()) == list(range(len(groups)))
    for group in set(groups.tolist()):
        assert (np.diff(order[groups[order] == group]) > 0).all()
        share = (groups == group).mean()
        seen = np.cumsum(groups[order] == group)
        assert (np.abs(seen - share * np.arange(1, len(groups) + 1)) <= 3.0).all()


@pytest.mark.parametrize("n", [10, 1000])
def test_a_million_frames_are_no_trouble(n):
    episodes = np.repeat(np.arange(10_000), 100)
    table = FrameTable(episodes % 500, episodes, np.tile(np.arange(100), 10_000), np.full(1_000_000, 100))
    assert len(set(choose_frames(table, n, 0).tolist())) == n
