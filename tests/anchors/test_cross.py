"""States drawn from statistics and moved histories."""

import pytest
import torch

from lerobot_craft.anchors.observations import (
    anchor_generator,
    draw_states,
    end_histories_at,
    jitter_states,
    move_towards,
)
from lerobot_craft.errors import CraftError

MEAN, STD = torch.tensor([1.0, -2.0, 5.0]), torch.tensor([0.5, 2.0, 0.0])
NORMAL = {"mean": MEAN, "std": STD}


def generator():
    return torch.Generator().manual_seed(0)


def test_mean_and_std_give_a_normal_distribution():
    states = draw_states(NORMAL, 20_000, generator())
    assert states.shape == (20_000, 3)
    torch.testing.assert_close(states.mean(0), MEAN, atol=0.05, rtol=0)
    torch.testing.assert_close(states.std(0), STD, atol=0.05, rtol=0)


@pytest.mark.parametrize("names", [("min", "max"), ("q01", "q99")])
def test_draws_stay_inside_the_bounds(names):
    low, high = MEAN - 0.3, MEAN + 0.2
    states = draw_states({**NORMAL, names[0]: low, names[1]: high}, 1000, generator())
    assert (states >= low).all()
    assert (states <= high).all()
    assert (states[:, 0] == low[0]).any()


def test_min_and_max_go_before_quantiles():
    stats = {**NORMAL, "min": MEAN - 9, "max": MEAN + 9, "q01": MEAN, "q99": MEAN}
    assert draw_states(stats, 1000, generator())[:, 1].std() > 1


@pytest.mark.parametrize("names", [("min", "max"), ("q01", "q99")])
def test_without_std_draws_are_uniform(names):
    low, high = torch.tensor([0.0, 3.0]), torch.tensor([2.0, 3.0])
    states = draw_states({"mean": low, names[0]: low, names[1]: high}, 20_000, generator())
    histogram = torch.histc(states[:, 0], bins=10, min=0, max=2) / 20_000
    torch.testing.assert_close(histogram, torch.full((10,), 0.1), atol=0.01, rtol=0)


def test_a_constant_dimension_stays_constant():
    assert (draw_states(NORMAL, 100, generator())[:, 2] == 5.0).all()
    bounds = {"min": torch.tensor([0.0, 3.0]), "max": torch.tensor([2.0, 3.0])}
    assert (draw_states(bounds, 100, generator())[:, 1] == 3.0).all()
    assert (jitter_states(torch.ones(100, 3), NORMAL, 1.0, generator())[:, 2] == 1.0).all()


def test_jitter_is_measured_in_standard_deviations():
    moved = jitter_states(torch.zeros(20_000, 3), NORMAL, 0.1, generator())
    torch.testing.assert_close(moved.std(0), 0.1 * STD, atol=0.005, rtol=0)
    width = {"min": torch.zeros(1), "max": torch.full((1,), 12**0.5)}  # a uniform distribution of std 1
    assert abs(jitter_states(torch.zeros(20_000, 1), width, 0.1, generator()).std() - 0.1) < 0.005


def test_a_history_moves_as_a_whole():
    history = torch.randn(4, 3, 2)  # [n, T, S]
    last = torch.randn(4, 2)
    moved = end_histories_at(history, last)
    torch.testing.assert_close(moved[:, -1], last)
    torch.testing.assert_close(moved.diff(dim=1), history.diff(dim=1))
    jittered = jitter_states(history, {"std": torch.ones(2)}, 0.5, generator())
    torch.testing.assert_close(jittered.diff(dim=1), history.diff(dim=1))
    assert (jittered != history).all()


def test_a_share_of_the_way():
    here, there = torch.zeros(1000, 2), torch.tensor([[2.0, -4.0]]).expand(1000, 2)
    moved = move_towards(here, there, generator())
    assert torch.allclose(moved[:, 1], -2 * moved[:, 0])  # on the line between them
    assert 0 <= float(moved[:, 0].min()) < 0.1
    assert 1.9 < float(moved[:, 0].max()) <= 2
    assert float(moved[:, 0].mean()) == pytest.approx(1, abs=0.1)


def test_a_single_state_is_replaced_exactly():
    last = torch.randn(4, 2)
    assert torch.equal(end_histories_at(torch.full((4, 2), 1e8), last), last)


def test_draws_keep_the_states_own_dtype():
    assert end_histories_at(torch.zeros(1, 2, dtype=torch.float64), torch.ones(1, 2)).dtype == torch.float64
    assert jitter_states(torch.zeros(1, 3, dtype=torch.float64), NORMAL, 1.0, generator()).dtype == torch.float64


def test_an_anchors_numbers_are_its_own():
    one = torch.rand(4, generator=anchor_generator(3, 17))
    assert torch.equal(one, torch.rand(4, generator=anchor_generator(3, 17)))
    others = [anchor_generator(3, 18), anchor_generator(4, 17), anchor_generator(17, 3)]
    assert not any(torch.equal(one, torch.rand(4, generator=other)) for other in others)


@pytest.mark.parametrize("stats", [{}, {"mean": MEAN}, {"min": MEAN, "q99": MEAN}])
def test_too_few_statistics_are_refused(stats):
    with pytest.raises(CraftError, match="drawn_states=0"):
        draw_states(stats, 1, generator())
    with pytest.raises(CraftError, match="state_jitter=0"):
        jitter_states(torch.zeros(1, 3), stats, 1.0, generator())


def test_statistics_that_are_not_finite_are_refused():
    with pytest.raises(CraftError, match="std of the state is not finite"):
        draw_states({"mean": MEAN, "std": STD.log()}, 1, generator())
