import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lerobot_craft.anchors.loader import batch_indices, by_origin, visit

sizes = st.tuples(st.integers(1, 60), st.integers(1, 12), st.integers(1, 4))


def step_of(num_anchors, batch_size, world_size, step, seed=0):
    """All ranks' indices of one step."""
    ranks = [batch_indices(num_anchors, batch_size, seed, step, rank, world_size) for rank in range(world_size)]
    assert all(rank.shape == (batch_size,) and rank.dtype == torch.int64 for rank in ranks)
    return torch.cat(ranks).tolist()


@given(sizes, st.integers(0, 5))
def test_every_anchor_comes_once_per_epoch(size, seed):
    num_anchors, batch_size, world_size = size
    steps = math.ceil(7 * num_anchors / (batch_size * world_size))
    stream = [i for step in range(steps) for i in step_of(num_anchors, batch_size, world_size, step, seed)]
    for epoch in range(len(stream) // num_anchors):
        assert sorted(stream[epoch * num_anchors : (epoch + 1) * num_anchors]) == list(range(num_anchors))


@given(sizes, st.integers(0, 400))
def test_no_anchor_comes_twice_in_a_step_unless_there_are_too_few(size, step):
    num_anchors, batch_size, world_size = size
    indices = step_of(num_anchors, batch_size, world_size, step)
    most = max(indices.count(i) for i in set(indices))
    assert most <= math.ceil(batch_size * world_size / num_anchors)


@pytest.mark.parametrize(("num_anchors", "batch_size"), [(20, 10), (21, 10), (23, 10), (29, 10), (31, 8), (65, 32)])
def test_a_step_across_two_epochs_repeats_no_anchor(num_anchors, batch_size):
    # Many epochs, because unmended permutations often get through one boundary by luck.
    for step in range(600):
        assert len(set(batch_indices(num_anchors, batch_size, 0, step).tolist())) == batch_size, step


@given(sizes, st.integers(0, 100))
def test_the_step_is_the_same_however_many_ranks_share_it(size, step):
    num_anchors, batch_size, world_size = size
    together = batch_indices(num_anchors, batch_size * world_size, 0, step).tolist()
    assert together == step_of(num_anchors, batch_size, world_size, step)


def test_the_order_does_not_depend_on_what_was_asked_before():
    forward = [batch_indices(37, 5, 1, step).tolist() for step in range(50)]
    backward = [batch_indices(37, 5, 1, step).tolist() for step in reversed(range(50))]
    assert forward == backward[::-1]


def test_seeds_and_epochs_differ():
    epochs = {tuple(batch_indices(40, 40, seed, 2 * epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(epochs) == 16
    long = [torch.cat([batch_indices(40, 10, 0, 4 * epoch + i) for i in range(4)]).tolist() for epoch in range(8)]
    assert len({tuple(order) for order in long}) == 8


def test_the_first_place_is_fair():
    # 43 anchors in steps of 10: most epochs begin inside a step and are mended there. Expected 93 +- 10 each.
    counts = torch.zeros(43)
    for epoch in range(4000):
        position = epoch * 43
        counts[batch_indices(43, 10, 0, position // 10)[position % 10]] += 1
    assert counts.min() > 50
    assert counts.max() < 140


def test_a_batch_may_be_changed_without_harm():
    first = batch_indices(20, 5, 0, 0)
    kept = first.clone()
    first.zero_()
    assert torch.equal(batch_indices(20, 5, 0, 0), kept)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    batch_indices(1000, 5, 99, 3)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    "arguments", [(0, 1, 0, 0), (1, 0, 0, 0), (1, 1, 0, -1), (1, 1, 0, 0, 1, 1), (1, 1, 0, 0, -1, 1)]
)
def test_impossible_batches_are_refused(arguments):
    with pytest.raises(ValueError, match="no batch"):
        batch_indices(*arguments)


def test_each_origin_fills_its_part_of_a_batch_however_few_it_has():
    few, many = torch.tensor([3, 5]), torch.arange(10, 110)
    for step in range(40):
        indices, passes, _ = visit([few, many], 9, seed=1, step=step)
        assert torch.isin(indices[:5], few).all()
        assert torch.isin(indices[5:], many).all()
        assert passes[:5].tolist() == [(step * 5 + place) // 2 for place in range(5)]
        assert passes[5:].tolist() == [(step * 4 + place) // 100 for place in range(4)]


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 50))
def test_a_visit_is_the_same_however_many_ranks_share_it(batch_size, world_size, step):
    origins = [torch.arange(7), torch.arange(7, 40)]
    together = visit(origins, batch_size * world_size, 0, step)
    assert together.places.tolist() == list(range(batch_size * world_size))
    for rank in range(world_size):
        mine = visit(origins, batch_size, 0, step, rank, world_size)
        assert len(mine.indices) == batch_size
        assert torch.equal(mine.indices, together.indices[mine.places])
        assert torch.equal(mine.passes, together.passes[mine.places])
        assert mine.places.tolist() == list(range(rank, batch_size * world_size, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_has_its_part_of_each_origin(world_size):
    origins = [torch.arange(7), torch.arange(7, 400)]
    for rank in range(world_size):
        old = (visit(origins, 4, 0, 3, rank, world_size).indices < 7).sum()
        assert old == 2


def test_a_batch_too_small_for_every_origin_takes_from_all_of_them_in_turn():
    seen = {int(visit([torch.arange(2), torch.arange(2, 6)], 1, 0, step).indices) for step in range(6)}
    assert seen == set(range(6))


@pytest.mark.parametrize(
    ("few", "many", "places", "expected"),
    [
        (20, 8000, 32, 1),  # 8 * 20 / (8 * 20 + 8000) of 32 is 0.6
        (100, 8000, 32, 2),
        (500, 8000, 32, 10),
        (1000, 8000, 32, 16),  # an eighth of the others fills half, and more does too
        (6000, 8000, 32, 16),
        (8000, 8000, 31, 15),
    ],
)
@pytest.mark.parametrize("rare_first", [True, False])
def test_few_anchors_take_no_more_places_than_their_visits_allow(few, many, places, expected, rare_first):
    rare, others = torch.arange(few), torch.arange(few, few + many)
    origins = [rare, others] if rare_first else [others, rare]
    indices = visit(origins, places, seed=0, step=3, most=8).indices
    assert len(indices) == places
    taken = int(torch.isin(indices, rare).sum())
    # Of an odd number of places the first origin has one more.
    assert taken == expected + (rare_first and few == many)


@given(st.integers(1, 30), st.integers(1, 300), st.integers(2, 40))
def test_a_rare_anchor_comes_at_most_so_many_times_as_often(few, many, places):
    few, many = sorted((few, many))
    indices = visit([torch.arange(few), torch.arange(few, few + many)], places, seed=0, step=0, most=8).indices
    taken = int((indices < few).sum())
    assert 1 <= taken < places
    assert taken == 1 or taken / few <= 8 * (places - taken) / many


def test_an_origin_without_anchors_has_no_part():
    assert [rows.tolist() for rows in by_origin(torch.tensor([0, 1, 0]))] == [[0, 2], [1]]
    assert [rows.tolist() for rows in by_origin(torch.tensor([1, 1]))] == [[0, 1]]
