import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lerobot_craft.core import (
    Gram,
    NonFiniteGradientError,
    Surgery,
    compute_dot,
    merge_grads,
    merge_weights,
    project_if_conflict,
)
from lerobot_craft.core.gradients import combine_
from tests.core.gradient_lists import clone, gradient_pairs, gradients, lambdas, scales, thresholds, vector

MODES = ["weighted", "equal", "task_priority"]
modes = st.sampled_from(MODES)


def merged(pair, lambda_, surgery, gain=1.0):
    """The merged update as a long vector, and the weights that made it."""
    t, r = map(clone, pair)
    weights = merge_weights(Gram.of(t, r), lambda_, surgery, gain)
    return vector(combine_(t, r, weights.task, weights.retention)), weights


@given(gradient_pairs(), lambdas, modes, thresholds)
def test_after_projection_the_update_does_not_raise_the_retention_loss(pair, lambda_, mode, threshold):
    update, weights = merged(pair, lambda_, Surgery(projection_mode=mode, conflict_threshold=threshold))
    if weights.conflict:
        r = vector(pair[1])
        # First order: L_ret(theta - eta u) = L_ret(theta) - eta <u, r>.
        assert float(update @ r) >= -1e-9 * float(update.norm() * r.norm() + vector(pair[0]).norm() * r.norm())


@given(gradient_pairs(), lambdas, modes)
def test_no_conflict_means_plain_merging(pair, lambda_, mode):
    on, weights = merged(pair, lambda_, Surgery(projection_mode=mode))
    off, _ = merged(pair, lambda_, Surgery(projection_mode=mode, use_grad_projection=False))
    assert weights.conflict == (Gram.of(*pair).cos < -0.1)
    if not weights.conflict:
        assert torch.equal(on, off)


@given(gradient_pairs(), lambdas)
def test_each_mode_is_its_formula(pair, lambda_):
    t, r = map(vector, pair)
    t_projected = t - (t @ r) / (r @ r) * r if compute_dot(*pair) < 0 else t
    for mode, expected in {
        "weighted": t_projected + lambda_ * r,
        "equal": (t_projected + r) / 2,
        "task_priority": t_projected + min(lambda_, 1) * r,
    }.items():
        update, _ = merged(pair, lambda_, Surgery(projection_mode=mode, conflict_threshold=0.0))
        assert_close(update, expected, rtol=1e-9, atol=1e-9 * float(t.norm() + (1 + lambda_) * r.norm()))


@given(gradient_pairs(), scales, scales, thresholds)
def test_the_threshold_is_a_cosine(pair, scale_t, scale_r, threshold):
    t, r = pair
    scaled = ([None if x is None else scale_t * x for x in t], [None if x is None else scale_r * x for x in r])
    cos = Gram.of(t, r).cos
    assert Gram.of(*scaled).cos == pytest.approx(cos, abs=1e-12)
    if abs(cos - threshold) > 1e-9:
        surgery = Surgery(conflict_threshold=threshold)
        assert merged(scaled, 1.0, surgery)[1].conflict == merged(pair, 1.0, surgery)[1].conflict


@given(gradient_pairs(), lambdas, modes, scales)
def test_scaling_both_gradients_scales_the_update(pair, lambda_, mode, scale):
    surgery = Surgery(projection_mode=mode, conflict_threshold=0.0)
    scaled = tuple([None if x is None else scale * x for x in grads] for grads in pair)
    expected = scale * merged(pair, lambda_, surgery)[0]
    size = scale * float(vector(pair[0]).norm() + (1 + lambda_) * vector(pair[1]).norm())
    assert_close(merged(scaled, lambda_, surgery)[0], expected, rtol=1e-9, atol=1e-9 * size)


@given(gradient_pairs(), lambdas, modes, st.permutations(range(4)))
def test_order_of_parameters_does_not_matter(pair, lambda_, mode, order):
    surgery = Surgery(projection_mode=mode)
    here = merge_weights(Gram.of(*pair), lambda_, surgery)
    there = merge_weights(Gram.of(*([grads[i] for i in order] for grads in pair)), lambda_, surgery)
    assert there == pytest.approx(here, rel=1e-9, abs=1e-9 * (1 + abs(here.retention)))


@given(gradient_pairs(dtype=torch.bfloat16), st.floats(0, 10), modes)
def test_bfloat16_agrees_with_float64(pair, lambda_, mode):
    surgery = Surgery(projection_mode=mode, conflict_threshold=-0.5)
    wide = tuple([None if g is None else g.double() for g in grads] for grads in pair)
    if abs(Gram.of(*wide).cos + 0.5) < 1e-3:
        return  # either side of the threshold is right
    size = float(vector(pair[0]).norm() + (1 + lambda_) * vector(pair[1]).norm())
    assert_close(merged(pair, lambda_, surgery)[0], merged(wide, lambda_, surgery)[0], rtol=0, atol=0.01 * size)


@given(gradient_pairs(), lambdas, modes, scales, scales, scales)
def test_bounds_hold(pair, lambda_, mode, task_bound, retention_bound, merged_bound):
    t, r = map(vector, pair)
    surgery = Surgery(
        projection_mode=mode,
        use_grad_projection=False,
        task_max_norm=task_bound,
        retention_max_norm=retention_bound,
    )
    _, weights = merged(pair, lambda_, surgery)
    slack = 1 + 1e-9
    assert weights.task * float(t.norm()) <= task_bound * slack
    assert weights.retention * float(r.norm()) <= retention_bound * slack
    update, weights = merged(pair, lambda_, Surgery(projection_mode=mode, merged_max_norm=merged_bound))
    assert float(update.norm()) <= merged_bound * slack
    assert weights.norm == pytest.approx(float(update.norm()), rel=1e-6, abs=1e-7 * float(t.norm()))


def test_the_retention_bound_holds_the_product_with_lambda():
    # A clip of the sum at 1 would leave the task 1/11 of its length; bounded first, it keeps at least half.
    t, r = [torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 1.0])]
    surgery = Surgery(task_max_norm=1.0, retention_max_norm=1.0, merged_max_norm=1.0)
    weights = merge_weights(Gram.of(t, r), 10.0, surgery)
    assert weights.task == pytest.approx(1 / math.sqrt(2))
    unbounded = merge_weights(Gram.of(t, r), 10.0, Surgery(merged_max_norm=1.0))
    assert unbounded.task == pytest.approx(1 / math.sqrt(101))
    assert (weights.bounded, unbounded.bounded) == (True, False)


@pytest.mark.parametrize(
    ("lambda_", "gain", "is_bounded"), [(1.5, 1, False), (2.0, 1, False), (2.5, 1, True), (1.5, 2, True)]
)
def test_at_the_bound_a_larger_multiplier_changes_nothing(lambda_, gain, is_bounded):
    t, r = [torch.tensor([1.0, 0.0])], [torch.tensor([0.0, 2.0])]
    surgery = Surgery(task_max_norm=4.0, retention_max_norm=4.0, merged_max_norm=4.0)
    weights, more = (merge_weights(Gram.of(t, r), value, surgery, gain) for value in (lambda_, 2 * lambda_))
    assert weights.bounded is is_bounded
    assert (weights == more) is is_bounded


def test_a_parameter_that_one_loss_reaches_is_never_dropped():
    t = [torch.ones(2), None, torch.ones(2), None]
    r = [torch.ones(2), torch.ones(3), None, None]
    out = merge_grads(t, r, 2.0)
    assert [None if g is None else g.tolist() for g in out] == [[3, 3], [2, 2, 2], [1, 1], None]


def test_projection_reaches_parameters_without_task_gradient():
    t, r = [torch.tensor([-3.0]), None], [torch.tensor([1.0]), torch.tensor([1.0])]
    projected, conflict = project_if_conflict(t, r)
    assert conflict
    assert [g.tolist() for g in projected] == [[-1.5], [1.5]]  # t - (-3/2) r
    assert [g.tolist() for g in r] == [[1.0], [1.0]]  # the retention gradient is still the caller's
    assert compute_dot(projected, r) == pytest.approx(0.0)


def test_without_conflict_the_task_gradient_is_untouched():
    t, r = gradients(1), gradients(2)
    r = [y + 2 * x for x, y in zip(t, r, strict=True)]
    before = clone(t)
    projected, conflict = project_if_conflict(t, r)
    assert not conflict
    assert all(torch.equal(x, y) for x, y in zip(projected, before, strict=True))


@pytest.mark.parametrize("mode", MODES)
def test_zero_gradients_have_no_angle_and_no_conflict(mode):
    surgery = Surgery(projection_mode=mode, conflict_threshold=0.0)
    g, zero = gradients(1), [torch.zeros_like(x) for x in gradients(1)]
    for pair in ((g, zero), (zero, g), (zero, zero), (g, [None] * 4), ([None] * 4, g)):
        assert Gram.of(*pair).cos == 0.0
        update, weights = merged(pair, 2.0, surgery)
        assert not weights.conflict
        assert torch.isfinite(update).all()


def test_a_gradient_too_short_to_divide_by_is_zero():
    g = gradients(1)
    noise = [-1e-31 * x for x in g]
    assert Gram.of(g, noise).cos == 0.0
    expected = (1, 1, False, False, vector(g).norm().item())
    assert merge_weights(Gram.of(g, noise), 1.0, Surgery()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("dtype", "ratio", "conflict"),
    [
        (torch.float64, 1e-7, True),
        (torch.float32, 1e-7, False),
        (torch.float32, 1e-5, True),
        (torch.bfloat16, 1e-2, False),
        (torch.bfloat16, 1e-1, True),
    ],
)
def test_no_conflict_is_found_in_rounding(dtype, ratio, conflict):
    t = gradients(1)
    r = [-ratio * x for x in t]
    whole, parts = Gram.by_part(t, r, [0, 0, 1, 1], None, dtype)
    weights = merge_weights(whole, 2.0, Surgery())
    assert weights.conflict is conflict
    assert [gram.has_direction for gram in (whole, *parts)] == [conflict] * 3
    if not conflict:
        assert (whole.cos, weights.task, weights.retention) == (0.0, 1.0, 2.0), "the pull stays, the task is untouched"


@pytest.mark.parametrize("size", [1e-36, 1e-26, 1e-12, 1e12, 1e20, 1e36])
def test_no_finite_size_hides_a_conflict_or_makes_one(size):
    t = [torch.tensor([1.0, 2.0]) * size, torch.tensor([3.0]) * size]
    r = [torch.tensor([-1.0, 0.0]) * size, torch.tensor([0.5]) * size]
    gram = Gram.of(t, r)
    assert gram.task_norm == pytest.approx(math.sqrt(14) * size, rel=1e-5)
    assert gram.cos == pytest.approx(0.5 / math.sqrt(14 * 1.25), rel=1e-5)
    assert project_if_conflict(t, [-x for x in r])[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["task", "retention"])
def test_non_finite_gradients_are_refused_by_name(which, bad):
    pair = {"task": gradients(1), "retention": gradients(2)}
    pair[which][1][0, 0] = bad
    with pytest.raises(NonFiniteGradientError, match=f"the {which} gradient") as error:
        merge_weights(Gram.of(pair["task"], pair["retention"]), 1.0, Surgery())
    assert error.value.which == which


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"conflict_threshold": 0.1}, r"cosine and must lie in \[-1, 0\]"),
        ({"conflict_threshold": math.nan}, r"cosine and must lie in \[-1, 0\]"),
        ({"projection_mode": "sum"}, "weighted, equal, task_priority"),
        ({"task_max_norm": 0.0}, "task_max_norm must be positive"),
        ({"merged_max_norm": math.nan}, "merged_max_norm must be positive"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Surgery(**settings)
