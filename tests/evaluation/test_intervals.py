import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from lerobot_craft.evaluation.intervals import (
    Cell,
    bootstrap_mean,
    bootstrap_ratio,
    distinct_starts,
    envelope,
    nested_mean,
    newcombe,
    newcombe_paired,
    paired_cells,
    wilson,
)


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


def test_newcombe_for_pairs_gives_published_numbers():
    # Newcombe 1998 (Statistics in Medicine 17, 2635), method 10: 36 + 12 + 2 of 50; and Altman et al. 2000, "Statistics
    # with confidence", table 6.2: 14 + 5 + 0 of 41.
    assert newcombe_paired(36 / 50, 12 / 50, 2 / 50, 50) == pytest.approx((0.0569, 0.3404), abs=5e-5)
    assert newcombe_paired(14 / 41, 5 / 41, 0.0, 41) == pytest.approx((0.011, 0.226), abs=5e-4)


def test_pairs_that_are_not_correlated_are_two_samples():
    assert newcombe_paired(0.3, 0.3, 0.2, 100) == pytest.approx(newcombe((60, 100), (50, 100)))
    assert newcombe_paired(1.0, 0.0, 0.0, 20) == pytest.approx(newcombe((20, 20), (20, 20)))
    correlated, opposed = newcombe_paired(0.5, 0.1, 0.0, 100), newcombe_paired(0.1, 0.5, 0.4, 100)
    (low, high) = newcombe((60, 100), (50, 100))
    assert low < correlated[0] < 0.1 < correlated[1] < high
    assert opposed[0] < low < high < opposed[1]


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


def played(episodes, trunk=None, own=True):
    """Cells of outcomes [scenarios, seeds, tasks, starts]."""
    return [
        Cell(f"s{i}", j, f"t{k}", float(np.mean(outcomes)), trunk, tuple(map(int, outcomes)), own)
        for i, seeds in enumerate(episodes)
        for j, tasks in enumerate(seeds)
        for k, outcomes in enumerate(tasks)
    ]


def width(interval):
    return interval[1] - interval[0]


def test_starts_are_drawn_within_their_cell_as_a_loop_would():
    values = np.random.default_rng(2).random((2, 3, 4, 6)) < 0.7
    rng = np.random.default_rng(5)

    def draw(items):
        return [items[i] for i in rng.integers(len(items), size=len(items))]

    means = [
        np.mean(
            [
                [np.mean([np.mean(draw(starts)) for starts in draw(tasks)]) for tasks in draw(seeds)]
                for seeds in draw(values)
            ]
        )
        for _ in range(4000)
    ]
    found = bootstrap_mean(played(values), resamples=20_000)
    assert found == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.02)


def test_starts_that_seeds_share_are_drawn_once_for_all_of_them_as_a_loop_would():
    values = np.random.default_rng(2).random((2, 3, 4, 6)) < 0.7
    rng = np.random.default_rng(5)

    def draw(count):
        return rng.integers(count, size=count)

    means = []
    for _ in range(4000):
        drawn = np.stack([values[:, :, task, draw(6)].mean(axis=2) for task in range(4)], axis=2)
        means.append(np.mean([[drawn[i, j, draw(4)].mean() for j in draw(3)] for i in draw(2)]))
    found = bootstrap_mean(played(values, own=False), resamples=20_000)
    assert found == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])), abs=0.02)


@pytest.mark.parametrize("trunk", [None, "t"])
def test_shared_starts_are_less_sure_than_starts_of_each_seed(trunk):
    # Every seed does the same from the same starts: with shared ones that is one observation, not six.
    starts = np.random.default_rng(1).random((1, 1, 1, 12)) < 0.6
    values = np.broadcast_to(starts, (1, 6, 1, 12))
    own, shared = (bootstrap_mean(played(values, trunk, own)) for own in (True, False))
    assert width(shared) > 1.8 * width(own)
    assert width(shared) == pytest.approx(width(bootstrap_mean(played(starts))), abs=0.06)


def test_scenarios_of_one_trunk_are_measured_from_the_same_starts():
    starts = np.random.default_rng(1).random((1, 3, 1, 12)) < 0.6
    values = np.broadcast_to(starts, (4, 3, 1, 12))
    together, apart = (bootstrap_mean(played(values, trunk)) for trunk in ("t", None))
    assert width(together) == pytest.approx(width(bootstrap_mean(played(starts))), abs=0.06)
    assert width(together) > 1.4 * width(apart)


def test_start_states_are_counted_once():
    values = np.ones((3, 2, 4, 5))
    assert distinct_starts(played(values)) == 2 * 4 * 5
    assert distinct_starts(played(values, own=False)) == 4 * 5


def test_one_cell_with_episodes_is_scipys_bootstrap():
    outcomes = np.random.default_rng(3).random(30) < 0.6
    expected = stats.bootstrap(
        (outcomes,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    found = bootstrap_mean(played([[[outcomes]]]), resamples=20_000)
    assert found == pytest.approx((expected.low, expected.high), abs=0.034)  # one episode of thirty


def simulated(rng, seeds=6, tasks=2, starts=10):
    """Two sides with success 0.7 and 0.6 from the same starts, which are hard or easy for both."""
    hardness = rng.random((1, seeds, tasks, starts))
    noise = rng.random((2, 1, seeds, tasks, starts)) < 0.1
    first, second = (
        np.where(flip, rng.random(hardness.shape) < rate, hardness < rate)
        for flip, rate in zip(noise, (0.7, 0.6), strict=True)
    )
    return played(first), played(second)


def test_paired_starts_cover_the_true_difference_and_are_surer_than_unpaired_ones():
    rng = np.random.default_rng(0)
    covered, paired, unpaired = 0, 0.0, 0.0
    for _ in range(200):
        first, second = simulated(rng)
        low, high = bootstrap_mean(paired_cells(first, second), resamples=400, seed=0)
        covered += low <= 0.1 <= high
        paired += high - low
        # Starts of the other side in another order: the same rates, no pairs.
        shuffled = [
            Cell(c.scenario, c.seed, c.task, c.value, None, tuple(rng.permutation(c.episodes)), True) for c in second
        ]
        unpaired += width(bootstrap_mean(paired_cells(first, shuffled), resamples=400, seed=0))
    assert covered / 200 >= 0.9
    assert paired < 0.8 * unpaired


def test_cells_are_paired_with_their_own_kind_only():
    one, other = played(np.ones((1, 1, 2, 4))), played(np.zeros((1, 1, 2, 4)))
    assert [cell.episodes for cell in paired_cells(one, other)] == [(1, 1, 1, 1)] * 2
    fewer = played(np.zeros((1, 1, 2, 3)))
    assert [(cell.value, cell.episodes) for cell in paired_cells(one, fewer)] == [(1.0, ())] * 2
    assert [cell.episodes for cell in paired_cells(one, played(np.zeros((1, 1, 2, 4)), own=False))] == [()] * 2
    with pytest.raises(ValueError, match="not of the same task of the same run"):
        paired_cells(one, played(np.zeros((1, 2, 1, 4))))


def test_a_ratio_is_drawn_on_both_sides_together():
    before = played(np.random.default_rng(4).random((2, 3, 4, 10)) < 0.8)
    assert bootstrap_ratio(before, before) == (1.0, 1.0)
    halves = [Cell(c.scenario, c.seed, c.task, c.value / 2) for c in before]
    whole = [Cell(c.scenario, c.seed, c.task, c.value) for c in before]
    assert bootstrap_ratio(halves, whole) == pytest.approx((0.5, 0.5))
    with pytest.raises(ValueError, match="the same scenarios, seeds and tasks"):
        bootstrap_ratio(before, before[1:])


def test_a_large_table_takes_less_than_a_second():
    table = played(np.random.default_rng(0).random((4, 3, 11, 20)) < 0.9)
    began = time.perf_counter()
    bootstrap_mean(table, seed=123)  # a seed that no other test has drawn yet
    assert time.perf_counter() - began < 1.0
