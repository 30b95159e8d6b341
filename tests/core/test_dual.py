import itertools
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lerobot_craft.core import Dual, Multipliers, epsilon_schedule, update_lambda
from lerobot_craft.errors import CraftError

RULES = ["ascent", "pi", "log", "ratio"]
rules = st.sampled_from(RULES)
anything = st.one_of(st.none(), st.floats())  # NaN and infinities included


def make(rule="ascent", groups=("all",), **settings):
    return Multipliers(Dual(rule=rule, **({"lambda_min": 1e-3} if rule in ("log", "ratio") else {}) | settings), groups)


@pytest.mark.parametrize(
    ("lambda_", "loss", "epsilon", "expected"),
    [(1.0, 0.8, 0.5, 1.03), (1.0, 0.2, 0.5, 0.97), (9.99, 5.0, 0.0, 10.0), (0.01, 0.0, 5.0, 0.0)],
)
def test_the_specified_rule(lambda_, loss, epsilon, expected):
    assert update_lambda(lambda_, loss, epsilon, lambda_lr=0.1, lambda_max=10.0) == pytest.approx(expected)


@given(rules, st.lists(anything, max_size=30), st.floats(0, 1e6), st.floats(0, 1), st.integers(1, 1000))
def test_a_multiplier_is_always_finite_and_within_its_bounds(rule, violations, lr, fall_rate, steps):
    multipliers = make(rule, lambda_lr=lr, fall_rate=fall_rate, proportional_gain=1e3, smoothing=0.9)
    for violation in violations:
        (value,) = multipliers.update([violation], elapsed_steps=steps)
        assert multipliers.dual.lambda_min <= value <= 10.0


@given(rules, st.lists(anything), st.integers(1, 1000))
@example("ascent", [1e308], 1000)  # overflows to infinity if it is not cut, and 0 * infinity is NaN
def test_a_learning_rate_of_zero_is_a_fixed_lambda(rule, violations, steps):
    multipliers = make(rule, lambda_lr=0.0)
    for violation in violations:
        assert multipliers.update([violation], elapsed_steps=steps) == pytest.approx([1.0])


@given(rules, st.floats(-100, 100))
def test_the_sign_of_the_violation_is_the_direction(rule, violation):
    (value,) = make(rule, proportional_gain=0.0).update([violation])
    assert (value - 1.0) * violation >= 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("nothing", [None, math.nan, math.inf, -math.inf])
def test_no_measurement_leaves_the_multiplier_alone(rule, nothing):
    multipliers = make(rule, groups=("a", "b"))
    multipliers.update([0.3, 0.3])
    before = multipliers.state_dict()
    assert multipliers.update([nothing, nothing]) == before["values"]
    assert multipliers.state_dict() == before


def test_groups_move_by_their_own_violation():
    assert make(groups=("open", "close")).update([1.0, -2.0]) == pytest.approx([1.01, 0.98])


def test_pi_is_its_formula():
    # lambda += lr (e_t + kp (xi_t - xi_{t-1})), xi_t = nu xi_{t-1} + (1 - nu) e_t, xi_{-1} = 0
    multipliers = make("pi", lambda_lr=0.1, proportional_gain=2.0, smoothing=0.5)
    assert multipliers.update([1.0]) == pytest.approx([1 + 0.1 * (1.0 + 2 * 0.5)])
    assert multipliers.update([0.0]) == pytest.approx([1.2 + 0.1 * (0.0 + 2 * (0.25 - 0.5))])


def test_log_moves_by_a_factor():
    assert make("log", lambda_lr=0.5).update([1.0]) == pytest.approx([math.exp(0.5)])


@pytest.mark.parametrize(
    ("drift", "epsilon", "factor"),
    [
        (0.2, 0.1, 2**0.5),  # twice the budget, whatever the budget is
        (2.0, 1.0, 2**0.5),
        (0.05, 0.1, 2**-0.5),
        (0.1, 0.1, 1.0),
        (100.0, 0.1, math.exp(0.5)),  # one measurement moves it by e to the lambda_lr at most
        (0.0, 0.1, math.exp(-0.5)),
        (0.1, 0.0, math.exp(0.5)),
    ],
)
def test_ratio_moves_by_how_many_times_the_budget_the_drift_is(drift, epsilon, factor):
    multipliers = make("ratio", lambda_lr=0.5, proportional_gain=0.0)
    assert multipliers.follow([drift], epsilon) == [pytest.approx(factor)]


def test_ratio_is_damped_by_how_fast_the_drift_changes():
    """At twice the budget a multiplier still rises, less while the drift falls and more while it grows."""
    factors = {}
    for before in (0.15, 0.2, 0.25):
        multipliers = make("ratio", lambda_lr=0.1, proportional_gain=1.0)
        (first,) = multipliers.follow([before], 0.1)
        factors[before] = multipliers.follow([0.2], 0.1)[0] / first
    assert factors[0.2] == pytest.approx(2**0.1)
    assert factors[0.25] < factors[0.2] < factors[0.15]


def test_the_other_rules_follow_the_difference():
    assert make(lambda_lr=0.5).follow([0.4], 0.2) == [pytest.approx(1.1)]
    assert make("ratio", groups=("a", "b")).follow([None, math.nan], 0.2) == [1.0, 1.0]


@pytest.mark.parametrize("rule", RULES)
def test_quick_to_rise_slow_to_fall(rule):
    symmetric, careful = make(rule, proportional_gain=0.0), make(rule, proportional_gain=0.0, fall_rate=0.1)
    assert careful.update([1.0]) == symmetric.update([1.0])
    fall, slow = (math.log(m.values[0] / m.update([-1.0])[0]) for m in (symmetric, careful))
    assert slow == pytest.approx(0.1 * fall, rel=0.02)


def test_the_floor_holds():
    multipliers = make(lambda_min=0.5, lambda_lr=1.0)
    assert multipliers.update([-100.0]) == [0.5]


@pytest.mark.parametrize("rule", RULES)
def test_a_measurement_every_k_steps_stands_for_k_steps(rule):
    # Exact for a constant violation: K=4 once equals K=1 four times (the proportional part telescopes).
    often, seldom = make(rule), make(rule)
    for _ in range(4):
        often.update([0.1])
    seldom.update([0.1], elapsed_steps=4)
    assert seldom.values == pytest.approx(often.values, rel=1e-12)


@given(
    rules, st.lists(st.tuples(anything, anything), max_size=10), st.lists(st.tuples(anything, anything), max_size=10)
)
def test_state_goes_through_json_and_the_run_goes_on_the_same(rule, before, after):
    straight = make(rule, groups=("a", "b"), smoothing=0.3)
    for violations in before:
        straight.update(violations)
    resumed = make(rule, groups=("a", "b"), smoothing=0.3)
    resumed.load_state_dict(json.loads(json.dumps(straight.state_dict(), allow_nan=False)))
    for violations in after:
        assert straight.update(violations) == resumed.update(violations)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "log"}, "rule 'log', this run has 'ascent'"),
        ({"groups": ["b", "a"]}, "groups"),
        ({"values": [1.0, math.nan]}, "not finite"),
        ({"smoothed": [None, 0.0]}, "not finite"),
    ],
)
def test_state_of_another_run_is_refused(change, message):
    multipliers = make(groups=("a", "b"))
    with pytest.raises(CraftError, match=message):
        multipliers.load_state_dict(multipliers.state_dict() | change)


def test_state_that_lacks_something_says_what():
    with pytest.raises(CraftError, match="lack groups, rule, smoothed"):
        make().load_state_dict({"values": [1.0]})


@pytest.mark.parametrize("rule", RULES)
def test_saved_values_are_brought_within_the_bounds_of_this_run(rule):
    multipliers = make(rule, groups=("a", "b"), lambda_min=0.5, lambda_max=5.0)
    multipliers.load_state_dict(multipliers.state_dict() | {"values": [0.0, 99.0]})
    assert multipliers.values == [0.5, 5.0]
    assert all(math.isfinite(v) for v in multipliers.update([1.0, 1.0]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rule": "adam"}, "ascent, pi, log"),
        ({"lambda_max": math.inf}, "lambda_max < infinity"),
        ({"lambda_min": 2.0, "lambda_max": 1.0}, "lambda_min <= lambda_max"),
        ({"initial_lambda": 11.0}, r"initial_lambda must lie in \[0.0, 10.0\]"),
        ({"lambda_lr": -1.0}, "lambda_lr"),
        ({"lambda_lr": math.nan}, "lambda_lr"),
        ({"fall_rate": 1.5}, "lambda_fall_rate"),
        ({"smoothing": 1.0}, "lambda_smoothing"),
        ({"proportional_gain": -1.0}, "lambda_gain"),
        ({"rule": "log"}, "set lambda_min > 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Dual(**settings)


def test_groups_need_distinct_names_and_one_violation_each():
    with pytest.raises(ValueError, match="distinct names"):
        Multipliers(Dual(), ("a", "a"))
    with pytest.raises(ValueError, match="2 violations are needed"):
        make(groups=("a", "b")).update([1.0])


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.55), ("cosine", 0.55), ("exponential", math.sqrt(0.1))])
def test_budget_goes_from_start_to_end(decay, middle):
    budget = [epsilon_schedule(s, 100, 1.0, 0.1, decay=decay) for s in range(150)]
    assert budget[0] == 1.0
    assert budget[50] == pytest.approx(middle)
    assert budget[100:] == pytest.approx([0.1] * 50)
    assert all(a >= b for a, b in itertools.pairwise(budget))


def test_cosine_starts_and_ends_gently():
    budget = [epsilon_schedule(s, 100, 1.0, 0.0, decay="cosine") for s in range(101)]
    assert budget[0] - budget[1] < 0.001 < 0.01 < budget[50] - budget[51]


def test_decay_steps_default_to_all_training_steps():
    assert epsilon_schedule(5, 10, 1.0, 0.0) == 0.5
    assert epsilon_schedule(5, 10, 1.0, 0.0, epsilon_decay_steps=5) == 0.0
    assert epsilon_schedule(0, 0, 1.0, 0.0) == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"decay": "step"}, "linear, cosine, exponential"),
        ({"epsilon_end": -0.1}, "not negative"),
        ({"epsilon_start": math.nan}, "finite and not negative"),
        ({"epsilon_start": math.inf}, "finite and not negative"),
        ({"epsilon_decay_steps": -5}, "epsilon_decay_steps must be 0"),
        ({"epsilon_end": 0.0, "decay": "exponential"}, "positive start and end"),
    ],
)
def test_bad_budgets_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        epsilon_schedule(**({"step": 0, "total_steps": 10, "epsilon_start": 1.0, "epsilon_end": 0.1} | arguments))
