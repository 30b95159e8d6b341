import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lerobot_craft.evaluation.intervals import newcombe, wilson
from lerobot_craft.evaluation.results import Knob, read_results
from lerobot_craft.evaluation.summary import collect, summarise, summarise_sequences
from tests.evaluation.made_results import METHODS, SCENES, made_runs, made_sequences

STORED = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("bench-*.json"))


@pytest.fixture(scope="module")
def runs():
    return made_runs(seeds=(0, 1, 2), policies=("smolvla",))


@pytest.fixture(scope="module")
def rows(runs):
    return summarise(runs)


def row_of(rows, method, frames=0, role="final"):
    (row,) = (r for r in rows if (r.method, r.frames, r.role) == (method, frames, role))
    return row


def test_every_setting_has_one_row_and_tuning_stays_apart(rows):
    assert [row.role for row in rows] == ["final"] * (len(METHODS) + 1) + ["tuning"] * (len(METHODS) + 1)
    final = row_of(rows, "craft", 20)
    assert final.scenarios == ["window", "drawer", "push"]
    assert (final.n_runs, final.n_seeds, final.n_episodes) == (9, 3, 20)
    assert row_of(rows, "craft", 20, "tuning").scenarios == ["faucet"]


def test_the_base_comes_first_and_counts_each_policy_once(rows, runs):
    base = rows[0]
    assert (base.method, base.n_runs, base.train_seconds, base.forgotten.value) == ("base", 9, None, 0.0)
    one = {(r.scenario, r.seed): r for r in runs if r.role == "final"}.values()
    expected = [r.base[task] for r in one for task in r.old_tasks]
    assert base.old_mean.value == pytest.approx(sum(expected) / len(expected))


def test_a_base_that_scenarios_share_is_counted_once(runs):
    plain = {(r.scenario, r.seed): r for r in runs if (r.method, r.role) == ("naive", "final")}
    tasks = dict.fromkeys(("reach", "plate", "lock"), 1.0)
    shared = [
        replace(r, base=tasks | {"new": 0.0}, after=tasks | {"new": 1.0}, new_task="new", same_scene=None, trunk="t")
        for r in plain.values()
    ]
    base, row = summarise(shared)
    n = 3 * 3 * 20  # seeds, tasks, episodes; three scenarios begin with each policy
    assert (base.old_mean.low, base.old_mean.high) == pytest.approx(wilson(n, n))
    assert row.old_mean.low == pytest.approx(wilson(3 * n, 3 * n)[0])
    assert (row.forgotten.low, row.forgotten.high) == pytest.approx(newcombe((n, n), (3 * n, 3 * n)))
    own, row = summarise([replace(r, trunk=None) for r in shared])
    assert own.old_mean.low == row.old_mean.low == pytest.approx(wilson(3 * n, 3 * n)[0])


def test_means_are_those_of_the_runs(rows, runs):
    own = [r for r in runs if (r.method, r.anchors.frames, r.role) == ("er", 20, "final")]
    row = row_of(rows, "er", 20)
    old = [r.after[task] for r in own for task in r.old_tasks]
    lost = [r.base[task] - r.after[task] for r in own for task in r.old_tasks]
    assert row.old_mean.value == pytest.approx(sum(old) / len(old))
    assert row.forgotten.value == pytest.approx(sum(lost) / len(lost))
    assert row.same_scene.value == pytest.approx(sum(r.after[r.same_scene] for r in own) / 9)
    assert row.new.value == pytest.approx(sum(r.after[r.new_task] for r in own) / 9)
    assert row.bytes == 20 * 3100


def test_every_interval_holds_its_mean_and_is_no_narrower_than_wilsons(rows):
    for row in rows:
        for estimate, tasks in ((row.old_mean, 5), (row.same_scene, 1), (row.new, 1)):
            assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
            n = tasks * row.n_runs * row.n_episodes
            low, high = wilson(round(estimate.value * n), n)
            assert estimate.low <= low
            assert estimate.high >= high


def test_runs_that_all_agree_are_still_not_certain(runs):
    perfect = [replace(r, after=dict.fromkeys(r.after, 1.0)) for r in runs if r.method == "naive"]
    row = row_of(summarise(perfect), "naive")
    assert row.old_mean.value == 1.0
    assert row.old_mean.low == pytest.approx(wilson(900, 900)[0])


def test_runs_that_disagree_widen_the_interval(runs):
    own = [r for r in runs if r.method == "naive" and r.role == "final"]
    split = [replace(r, after=dict.fromkeys(r.after, float(r.seed != 0))) for r in own]
    estimate = row_of(summarise(split), "naive").old_mean
    assert estimate.high - estimate.low > 0.4  # Wilson's alone is 0.06 wide


def test_taking_all_frames_is_one_setting_however_many_there_are(rows, runs):
    assert len({r.anchors.frames for r in runs if r.method == "joint"}) > 1
    assert row_of(rows, "joint", None).n_runs == 9


def test_another_value_of_a_knob_is_another_row(runs):
    own = [r for r in runs if r.method == "l2sp" and r.role == "final"]
    swept = [*own, *(replace(r, knob=Knob(r.knob.flag, "0.1", ["faucet"])) for r in own)]
    assert [row.knob.value for row in summarise(swept) if row.knob] == ["0.01", "0.1"]


def test_no_same_scene_task_gives_no_same_scene_rate(runs):
    alone = [replace(r, same_scene=None) for r in runs if r.method == "naive"]
    assert row_of(summarise(alone), "naive").same_scene is None


def test_sequences_have_rows_of_their_own():
    sequences = made_sequences(seeds=(0, 1))
    assert summarise(sequences) == []
    rows = {row.method: row for row in summarise_sequences(sequences)}
    assert set(rows) == {"naive", "er", "craft"}
    assert rows["craft"].nbt_all.value < rows["er"].nbt_all.value < rows["naive"].nbt_all.value
    for row in rows.values():
        for score in (row.nbt_all, row.nbt_new, row.fwt_new, row.auc_all, row.auc_new, row.final_base, row.final_all):
            assert score.low < score.value <= score.high <= 1


def test_one_sequence_still_has_an_interval():
    (row,) = summarise_sequences([run for run in made_sequences(seeds=(0,)) if run.method == "craft"])
    assert row.nbt_all.high - row.nbt_all.low > 0.02


def plain(found):
    """As JSON values, numbers to nine digits: machines may differ in the last bits."""
    return json.loads(json.dumps(found, default=asdict), parse_float=lambda text: round(float(text), 9))


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_a_stored_summary_is_that_of_its_runs(path):
    results = read_results(path)
    again = collect(results.runs, command="", settings={})
    for kind in ("summary", "sequences", "correlations"):
        stored, today = (plain(getattr(found, kind)) for found in (results, again))
        assert stored == today, f"{kind} of {path.name}: write it anew with what `collect` makes of its runs"


def test_scenarios_of_the_made_results_are_what_the_tests_take_them_for():
    assert [name for name, (role, *_) in SCENES.items() if role == "tuning"] == ["faucet"]
