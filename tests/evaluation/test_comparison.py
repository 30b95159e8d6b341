from dataclasses import replace

import pytest

from lerobot_craft.bench.compared_methods import METHODS
from lerobot_craft.evaluation.results import Knob
from lerobot_craft.evaluation.table import OWN_VALUE, compare_with
from tests.evaluation.made_results import made_runs, with_episodes


@pytest.fixture(scope="module")
def runs():
    return made_runs(seeds=(0, 1, 2), policies=("smolvla",))


def test_only_methods_with_as_many_frames_are_compared(runs):
    found = [(row.role, row.label, row.frames, row.n_pairs) for row in compare_with(runs, "er")]
    assert found == [
        ("final", "CRaFT", 20, 9),
        ("final", "CRaFT", 100, 9),
        ("tuning", "CRaFT", 20, 3),
        ("tuning", "CRaFT", 100, 3),
    ]


def test_the_difference_is_the_mean_over_pairs(runs):
    first = compare_with(runs, "er")[0]
    final = [run for run in runs if run.role == "final"]
    ours = [run.after[t] for run in final if (run.method, run.anchors.frames) == ("craft", 20) for t in run.old_tasks]
    theirs = [run.after[t] for run in final if (run.method, run.anchors.frames) == ("er", 20) for t in run.old_tasks]
    assert first.old_mean.value == pytest.approx(sum(ours) / len(ours) - sum(theirs) / len(theirs))
    assert first.old_mean.low < first.old_mean.value < first.old_mean.high


def test_runs_are_paired_by_start(runs):
    ours, theirs = ([r for r in runs if (r.method, r.frames, r.role) == (m, 20, "final")] for m in ("craft", "er"))
    alike = [replace(a, after=b.after) for a, b in zip(ours, theirs, strict=True)]
    (paired,), (unpaired,) = (
        compare_with(found, "er") for found in (with_episodes([*alike, *theirs]), [*alike, *theirs])
    )
    assert paired.old_mean.value == unpaired.old_mean.value == 0.0
    # Each start has one outcome on both sides: the difference is surer than the rates are.
    assert paired.old_mean.high - paired.old_mean.low < 0.7 * (unpaired.old_mean.high - unpaired.old_mean.low)


def test_methods_are_compared_at_equal_tier_and_rollouts(runs):
    def given(method, **fields):
        return [replace(r, **fields) for r in runs if (r.method, r.frames, r.role) == (method, 20, "final")]

    reference = given("er", tier="rollouts", rollouts=3)
    assert [row.rollouts for row in compare_with([*reference, *given("craft", tier="rollouts", rollouts=3)], "er")] == [
        3
    ]
    for fields in (
        {"tier": "rollouts", "rollouts": 10},
        {"tier": "frames"},
        {"view": "seen", "tier": "rollouts", "rollouts": 3},
    ):
        assert compare_with([*reference, *given("craft", **fields)], "er") == []


def test_a_run_without_a_partner_is_left_out(runs):
    missing = [run for run in runs if not (run.method == "er" and run.seed == 2)]
    assert compare_with(missing, "er")[0].n_pairs == 6
    assert compare_with([run for run in runs if run.method != "er"], "er") == []


def swept(runs, *values):
    """Replay with several values of its knob: with the value v it keeps v of the old tasks."""
    return [
        replace(run, knob=Knob("--craft.replay_ratio", value, []), after=dict.fromkeys(run.after, float(value) / 10))
        for run in runs
        for value in values
        if run.method == "er"
    ]


@pytest.mark.parametrize("values", [("0.5", "1", "2"), ("2", "1", "0.5")])
def test_in_a_sweep_a_method_is_compared_with_the_reference_as_it_comes(runs, values):
    ours = [run for run in runs if (run.method, run.frames, run.role) == ("craft", 20, "final")]
    (found,) = compare_with([*swept(runs, *values), *ours], "er")
    kept = [run.after[task] for run in ours for task in run.old_tasks]
    assert (found.label, found.reference) == ("CRaFT", "replay (replay_ratio=1)")
    assert found.old_mean.value == pytest.approx(sum(kept) / len(kept) - 0.1)


def test_without_its_own_value_a_method_is_compared_with_each_and_each_is_named(runs):
    ours = [replace(run, knob=Knob("--craft.initial_lambda", "3", [])) for run in runs if run.method == "craft"]
    found = compare_with([*swept(runs, "0.5", "2"), *ours], "er")
    assert [(row.label, row.reference) for row in found if (row.role, row.frames) == ("final", 20)] == [
        ("CRaFT (initial_lambda=3)", "replay (replay_ratio=0.5)"),
        ("CRaFT (initial_lambda=3)", "replay (replay_ratio=2)"),
    ]


def test_its_own_value_is_the_bench_s():
    assert {name: f"{METHODS[name].knob.value:g}" for name in OWN_VALUE} == OWN_VALUE


def test_methods_that_need_no_frame_or_every_frame_are_not_compared(runs):
    for change in ({"frames": 0}, {"all_frames": True}):
        assert compare_with([replace(run, anchors=replace(run.anchors, **change)) for run in runs[:2]], "er") == []
