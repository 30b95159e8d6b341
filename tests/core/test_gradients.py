import math

import pytest
import torch
from hypothesis import given
from torch.testing import assert_close

from lerobot_craft.core import gradients as g
from tests.core.gradient_lists import clone, gradient_pairs, scales, vector


def assert_products_within(pair, tolerance):
    t, r = map(vector, pair)  # exact: float64 holds every bfloat16
    tt, tr, rr = g.inner_products(*pair)
    assert tt == pytest.approx(float(t @ t), rel=tolerance)
    assert rr == pytest.approx(float(r @ r), rel=tolerance)
    assert tr == pytest.approx(float(t @ r), abs=tolerance * float(t.norm() * r.norm()))


@given(gradient_pairs())
def test_inner_products_are_those_of_the_long_vectors(pair):
    assert_products_within(pair, 1e-12)


@given(gradient_pairs())
def test_products_of_parts_are_those_of_their_vectors_and_leave_the_whole_to_the_bit(pair):
    parts = [i % 3 for i in range(len(pair[0]))]
    whole, *of_parts = g.inner_products_by_part(*pair, parts)
    assert whole == g.inner_products(*pair)
    assert len(of_parts) == max(parts) + 1
    for number, products in enumerate(of_parts):
        own = [[x for x, part in zip(side, parts, strict=True) if part == number] for side in pair]
        assert products == pytest.approx(g.inner_products(*own), rel=1e-12, abs=1e-300)


def test_a_part_without_gradients_has_products_of_zero():
    ones = torch.ones(2)
    assert g.inner_products_by_part([ones, None], [ones, None], [0, 1])[1:] == [(2.0, 2.0, 2.0), (0.0, 0.0, 0.0)]


@given(gradient_pairs(), scales, scales)
def test_combination_is_that_of_the_long_vectors_and_in_place(pair, a, b):
    t, r = pair
    expected = a * vector(t) + b * vector(r)
    combined = g.combine_(t, r, a, b)
    assert_close(vector(combined), expected)
    for x, y, z in zip(t, r, combined, strict=True):
        assert z is (y if x is None else x)


@given(gradient_pairs(dtype=torch.bfloat16))
def test_bfloat16_products_are_accumulated_in_float32(pair):
    assert_products_within(pair, 1e-6)


def test_many_small_terms_do_not_stall_the_sum():
    ones = [torch.full((2**20,), 0.1, dtype=torch.bfloat16)]  # a bfloat16 sum would stop near 32
    exact = 2**20 * float(ones[0][0]) ** 2
    assert g.squared_norm(ones) == pytest.approx(exact, rel=1e-4)


def test_blocks_cover_gradients_longer_than_a_block_in_any_memory_layout(monkeypatch):
    monkeypatch.setattr(g, "_CPU_BLOCK", 7)
    t, r = [torch.randn(4, 5, 6, 3)], [torch.randn(4, 6, 5, 3).transpose(1, 2)]
    expected = ((t[0] ** 2).sum(), (t[0] * r[0]).sum(), (r[0] ** 2).sum())
    assert g.inner_products(t, r) == pytest.approx([float(x) for x in expected], rel=1e-5)


def test_empty_and_missing_gradients_are_zero():
    assert g.inner_products([None, torch.zeros(0)], [None, None]) == (0.0, 0.0, 0.0)
    assert g.combine_([None], [None], 1.0, 1.0) == [None]


def test_a_list_that_lost_an_entry_is_refused():
    with pytest.raises(ValueError, match="zip"):
        g.inner_products([torch.ones(1)], [])


def test_mixed_dtypes_combine():
    t = [torch.ones(2), torch.ones(2, dtype=torch.bfloat16)]
    assert [x.tolist() for x in g.combine_(t, clone(t), 2.0, 3.0)] == [[5, 5], [5, 5]]


def test_zero_weight_never_spreads_nan_and_makes_no_gradient_where_there_was_none():
    t, r = [torch.ones(2), None], [torch.full((2,), math.nan), torch.ones(2)]
    combined = g.combine_(t, r, 1.0, 0.0)
    assert_close(combined[0], torch.ones(2))
    assert combined[1] is None


def test_one_rank_averages_to_itself():
    grads = [torch.ones(2), None]
    averaged = g.average_over_ranks([torch.zeros(2), torch.zeros(3)], grads)
    assert averaged[0] is grads[0]
    assert averaged[1] is None


def test_gradients_never_share_memory():
    a, b, c, unused = (torch.ones(3, requires_grad=True) for _ in range(4))
    # Autograd hands one tensor to a and b, and an expanded view of one number to c.
    grads = g.differentiate([(a + b).square().sum() + c.sum()], [a, b, c, unused])
    assert grads[3] is None
    grads[0].mul_(0)
    assert [x.tolist() for x in grads[:3]] == [[0, 0, 0], [4, 4, 4], [1, 1, 1]]
    grads[2][0] = 7.0
    assert grads[2].tolist() == [7, 1, 1]
    assert all(p.grad is None for p in (a, b, c, unused))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_loss_is_left_as_it_is_to_the_bit(dtype):
    weight = torch.randn(5).to(dtype).requires_grad_()
    loss = (weight * weight).sum()
    assert torch.equal(g.loud(loss), loss)
    assert torch.equal(*(torch.autograd.grad(f(loss), weight, retain_graph=True)[0] for f in (g.loud, lambda x: x)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_gradient_of_a_loss_that_is_no_number_is_none_either(value):
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, value])).abs().sum()
    assert torch.autograd.grad(loss, weight, retain_graph=True)[0].isfinite().all()
    assert torch.autograd.grad(g.loud(loss), weight)[0].isnan().all()
