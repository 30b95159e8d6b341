from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from lerobot_craft.evaluation.correlation import correlate, pairs_per_run, pairs_per_task, spearman, spearman_of
from lerobot_craft.evaluation.results import Drift
from tests.evaluation.made_results import made_runs, made_sequences

TIED = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), min_size=2, max_size=30)


@given(TIED)
def test_spearman_is_scipys_with_ties_and_with_pairs_that_come_more_than_once(rows):
    first, second, times = np.array(rows, dtype=float).T
    assume(times.any())
    (ours,) = spearman(first, second, times[None])
    repeated = [np.repeat(side, times.astype(int)) for side in (first, second)]
    if any(len(set(side)) < 2 for side in repeated):
        assert np.isnan(ours)
    else:
        assert ours == pytest.approx(stats.spearmanr(*repeated).statistic)


@pytest.fixture(scope="module")
def runs():
    return made_runs(seeds=(0, 1), policies=("smolvla", "pi0_fast"))


def test_each_policy_has_its_own_and_action_drift_foretells_more(runs):
    found = correlate(runs)
    assert set(found) == {"smolvla", "pi0_fast"}
    for correlations in found.values():
        assert correlations.action_per_run.rho > 0.7 > correlations.hidden_per_run.rho
        assert correlations.action_per_run.n == len(runs) / 2
        assert correlations.action_per_task.n == 5 * len(runs) / 2
        assert correlations.hidden_per_task is None
        for one in (correlations.action_per_run, correlations.action_per_task):
            assert one.low <= one.rho <= one.high


def test_lost_success_is_that_of_old_tasks(runs):
    run = runs[0]
    (pair,) = pairs_per_run([run], "action")
    assert pair.lost == pytest.approx(np.mean([run.base[t] - run.after[t] for t in run.old_tasks]))
    assert {p.lost for p in pairs_per_task([run], "action")} == {run.base[t] - run.after[t] for t in run.old_tasks}


def test_too_little_gives_nothing(runs):
    assert spearman_of(pairs_per_run(runs[:3], "action")) is None
    assert spearman_of([]) is None
    unmeasured = [replace(run, drift=Drift(None, None)) for run in runs]
    assert correlate(unmeasured)["smolvla"].action_per_run is None


def test_one_base_gives_no_interval(runs):
    own = [run for run in runs if (run.policy, run.scenario, run.seed) == ("smolvla", "window", 0)]
    found = spearman_of(pairs_per_run(own, "action"))
    assert found.n == len(own)
    assert (found.low, found.high) == (None, None)


def test_scenarios_that_share_their_base_are_one_group(runs):
    own = [replace(run, trunk="t") for run in runs if run.seed == 0]
    assert len({run.scenario for run in own}) > 3
    assert spearman_of(pairs_per_run(own, "action")).low is None
    assert spearman_of(pairs_per_run([replace(run, trunk=None) for run in own], "action")).low is not None


def test_sequences_are_left_out():
    assert correlate(made_sequences()) == {}
