from dataclasses import replace

import pytest

from lerobot_craft.evaluation.comparison import compare_with
from tests.evaluation.made_results import made_runs


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


def test_a_run_without_a_partner_is_left_out(runs):
    missing = [run for run in runs if not (run.method == "er" and run.seed == 2)]
    assert compare_with(missing, "er")[0].n_pairs == 6
    assert compare_with([run for run in runs if run.method != "er"], "er") == []


def test_methods_that_need_no_frame_or_every_frame_are_not_compared(runs):
    for change in ({"frames": 0}, {"all_frames": True}):
        assert compare_with([replace(run, anchors=replace(run.anchors, **change)) for run in runs[:2]], "er") == []
