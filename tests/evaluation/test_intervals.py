import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lerobot_craft.evaluation.intervals import Cell, bootstrap_mean, envelope, nested_mean, newcombe, wilson


@given(
    st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95, 0.99])
)
def test_wilson_is_scipys(counts, confidence):
    expected = stats.binomtest(*counts).proportion_ci(confidence, method="wilson")
    assert wilson(*counts, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_wilson_has_a_width_where_all_or_none_succeed():
    assert wilson(20, 20) == (pytest.approx(0.8389, abs=1e-4), 1.0)
    assert wilson(0, 20) == (0.0, pytest.approx(0.1611, abs=1e-4))


@pytest.mark.parametrize("counts", [(-1, 3), (4, 3), (0, 0)])
def test_wilson_refuses_what_is_no_rate(counts):
    with pytest.raises(ValueError, match="no rate"):
        wilson(*counts)


def test_newcombe_gives_the_papers_numbers():
    # Newcombe 1998, table II: 56/70 against 48/80, method 10; and the extreme 10/10 against 0/10.
    assert newcombe((56, 70), (48, 80)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert newcombe((10, 10), (0, 10)) == pytest.approx((0.6075, 1.0), abs=5e-5)


def test_an_envelope_holds_all():
    assert envelope([(0.2, 0.5), (0.3, 0.9), (0.25, 0.4)]) == (0.2, 0.9)


def cells(*scenarios, trunk=None):
    """Cells of nested lists: scenarios of seeds of values per task."""
    return [
        Cell(f"s{i}", j, f"t{k}", value, trunk)
        for i, seeds in enumerate(scenarios)
        for j, values in enumerate(seeds)
        for k, value in enumerate(values)
    ]


def test_a_scenario_with_more_tasks_or_seeds_counts_no_more():
    assert nested_mean(cells([[1.0, 1.0, 1.0, 1.0], [1.0]], [[0.0]])) == 0.5


def test_one_level_of_the_bootstrap_is_scipys():
    values = np.random.default_rng(3).random(12)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    for tree in (cells(*[[[v]] for v in values]), cells([[v] for v in values]), cells([list(values)])):
        assert bootstrap_mean(tree, resamples=20_000) == pytest.approx((expected.low, expected.high), abs=0.01)


def test_drawing_whole_runs_is_wider_than_drawing_their_tasks_as_if_independent():
    tree = cells([[1.0] * 6, [0.2] * 6, [0.9] * 6, [0.5] * 6])
    flat = cells([[cell.value for cell in tree]])
    (low, high), (flat_low, flat_high) = bootstrap_mean(tree), bootstrap_mean(flat)
    assert high - low > 1.7 * (flat_high - flat_low)


def test_a_ragged_tree_is_drawn_as_a_loop_would():
    tree = [[[0.1, 0.9, 0.4], [0.7]], [[1.0, 0.0], [0.3, 0.6], [0.2]], [[0.8]]]
    rng = np.random.default_rng(5)

    def draw(items):
        return [items[i] for i in rng.integers(len(items), size=len(items))]

    means = [
        np.mean([np.mean([np.mean(draw(tasks)) for tasks in draw(seeds)]) for seeds in draw(tree)]) for _ in range(4000)
    ]
    expected = np.quantile(means, [0.025, 0.975])
    assert bootstrap_mean(cells(*tree), resamples=20_000) == pytest.approx(tuple(expected), abs=0.02)


def test_scenarios_of_one_trunk_draw_their_seeds_and_tasks_together_as_a_loop_would():
    values = np.random.default_rng(2).random((3, 4, 5))  # scenarios, seeds, tasks
    rng = np.random.default_rng(5)

    def draw(count):
        return rng.integers(count, size=count)

    means = [values[np.ix_(draw(3), draw(4), draw(5))].mean() for _ in range(20_000)]
    expected = np.quantile(means, [0.025, 0.975])
    found = bootstrap_mean(cells(*values.tolist(), trunk="t"), resamples=20_000)
    assert found == pytest.approx(tuple(expected), abs=0.01)


def test_one_base_for_all_scenarios_is_less_sure_than_one_for_each():
    seeds = [[1.0] * 5, [0.2] * 5, [0.9] * 5]
    (low, high), (own_low, own_high) = (bootstrap_mean(cells(seeds, seeds, seeds, trunk=t)) for t in ("t", None))
    # The three scenarios say the same thing three times.
    assert (low, high) == pytest.approx(bootstrap_mean(cells(seeds)), abs=0.05)
    assert high - low > 1.5 * (own_high - own_low)


def test_a_trunk_leaves_other_scenarios_as_they_are():
    shared, own = cells([[0.5] * 3] * 3, [[0.5] * 3] * 3, trunk="t"), cells([[0.1, 0.9, 0.4], [0.7, 0.2, 0.3]])
    own = [Cell("own", cell.seed, cell.task, cell.value) for cell in own]
    alone = [Cell(cell.scenario, cell.seed, cell.task, cell.value) for cell in shared]
    assert bootstrap_mean(shared + own) == bootstrap_mean(alone + own)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        seeds = np.clip(rng.normal(0.6, 0.1, size=15), 0, 1)
        tree = cells([[value] for value in rng.binomial(20, seeds) / 20])
        low, high = bootstrap_mean(tree, resamples=400, seed=trial)
        covered += low <= 0.6 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_equal_seeds_give_equal_intervals_and_equal_values_a_point():
    tree = cells([[0.1, 0.4], [0.8, 0.2]], [[0.5, 0.5]])
    assert bootstrap_mean(tree, seed=4) == bootstrap_mean(tree, seed=4) != bootstrap_mean(tree, seed=5)
    assert bootstrap_mean(cells([[0.1] * 3] * 3)) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_order_of_seeds_and_tasks_does_not_matter():
    tree = cells([[0.1, 0.4, 0.8], [0.8, 0.2, 0.0]], [[0.5, 0.7, 0.9]])
    other = sorted(tree, key=lambda cell: (cell.scenario, -cell.seed, -cell.value))
    assert [cell.task for cell in other] != [cell.task for cell in tree]
    assert bootstrap_mean(other) == bootstrap_mean(tree)


def test_a_cell_that_is_there_twice_is_refused():
    with pytest.raises(ValueError, match="measured twice"):
        nested_mean([Cell("s", 0, "t", 1.0), Cell("s", 0, "t", 0.0)])
    with pytest.raises(ValueError, match="no cells"):
        nested_mean([])
