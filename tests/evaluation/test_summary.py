import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lerobot_craft.evaluation.intervals import newcombe, wilson
from lerobot_craft.evaluation.results import Knob, read_results
from lerobot_craft.evaluation.summary import collect, summarise, summarise_sequences
from tests.evaluation.made_results import METHODS, SCENES, made_runs, made_sequences, with_episodes

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
        replace(r, base=tasks | {"new": 0.0}, after=tasks | {"new": 1.0}, new_task="new", same_scene=[], trunk="t")
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
    assert row.same_scene.value == pytest.approx(sum(r.after[r.same_scene[0]] for r in own) / 9)
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
    alone = [replace(r, same_scene=[]) for r in runs if r.method == "naive"]
    assert row_of(summarise(alone), "naive").same_scene is None


def test_elsewhere_and_same_scene_are_all_old_tasks(rows, runs):
    own = [r for r in runs if (r.method, r.anchors.frames, r.role) == ("er", 20, "final")]
    row = row_of(rows, "er", 20)
    assert row.elsewhere.value == pytest.approx(sum(r.after[t] for r in own for t in r.elsewhere) / 36)
    assert row.old_mean.value == pytest.approx((row.same_scene.value + 4 * row.elsewhere.value) / 5)
    everywhere = [replace(r, same_scene=r.old_tasks) for r in own]
    (_, row) = summarise(everywhere)
    assert (row.elsewhere, row.same_scene) == (None, row.old_mean)


def test_what_is_kept_is_a_ratio_of_means(rows, runs):
    own = [r for r in runs if (r.method, r.anchors.frames, r.role) == ("er", 20, "final")]
    row = row_of(rows, "er", 20)
    before, after = (sum(getattr(r, side)[t] for r in own for t in r.old_tasks) for side in ("base", "after"))
    assert row.kept.value == pytest.approx(after / before)
    assert row.kept.low < row.kept.value < row.kept.high
    assert (rows[0].kept.value, rows[0].kept.low) == (1.0, None)


def test_nothing_changed_is_still_not_certain(runs):
    own = [replace(r, after=r.base) for r in runs if r.method == "naive" and r.role == "final"]
    (_, row) = summarise(with_episodes(own))
    assert row.kept.value == 1.0
    assert row.kept.low < 0.999 < 1.001 < row.kept.high


def test_of_what_could_not_be_done_before_nothing_is_kept(runs):
    (_, row) = summarise([replace(r, base=dict.fromkeys(r.base, 0.0)) for r in runs[:1]])
    assert (row.kept, row.worst, row.worst_task) == (None, None, None)


def test_the_worst_task_is_one_of_a_scenario_over_its_seeds(runs):
    own = [r for r in runs if r.method == "naive" and r.role == "final"]
    even = [replace(r, base=dict.fromkeys(r.base, 0.8), after=dict.fromkeys(r.after, 0.8)) for r in own]

    def lowered(run):
        # 0 in one of three seeds; lower in each seed of one scenario; and a task that could not be done before.
        after = run.after | ({"reach": 0.0} if run.seed == 0 else {})
        after |= {"plate-slide": 0.4, "door-lock": 0.0} if run.scenario == "drawer" else {}
        return replace(run, after=after, base=run.base | {"door-lock": 0.0})

    (base, row) = summarise(map(lowered, even))
    assert (row.worst, row.worst_task) == (pytest.approx(0.5), "plate-slide (drawer)")
    assert (base.worst, base.worst_task) == (None, None)
    (_, row) = summarise(lowered(r) for r in even if r.scenario == "window")
    assert (row.worst, row.worst_task) == (pytest.approx(2 / 3), "reach")


def test_clusters_are_counted(runs):
    own = [r for r in runs if r.method == "naive" and r.role == "final"]
    (_, row) = summarise(own)
    assert (row.n_scenarios, row.n_seeds, row.n_bases, row.n_runs, row.n_starts) == (3, 3, 9, 9, 20)
    (base, row) = summarise(replace(r, trunk="t", starts_by_seed=True) for r in own)
    assert (row.n_scenarios, row.n_seeds, row.n_bases, row.n_runs, row.n_starts) == (3, 3, 3, 9, 60)
    assert (base.n_bases, base.n_starts) == (3, 60)


@pytest.mark.parametrize("by_seed", [True, False])
def test_wilson_counts_every_start_state_once(runs, by_seed):
    perfect = [replace(r, after=dict.fromkeys(r.after, 1.0)) for r in runs if r.method == "naive" and r.role == "final"]
    (_, row) = summarise(with_episodes(perfect, starts_by_seed=by_seed))
    seeds = 3 if by_seed else 1
    for estimate, tasks in ((row.old_mean, 4 + 3), (row.same_scene, 3), (row.elsewhere, 4), (row.new, 3)):
        n = 20 * seeds * tasks  # four tasks are in all three scenarios: that adds no start state
        assert (estimate.low, estimate.high) == pytest.approx(wilson(n, n))


def test_starts_that_seeds_share_make_wider_intervals(runs):
    own, shared = (
        row_of(summarise(with_episodes(runs, starts_by_seed=by_seed)), "er", 20).old_mean for by_seed in (True, False)
    )
    assert shared.value == own.value
    assert shared.high - shared.low > own.high - own.low


def test_a_base_policy_is_also_measured_blindfolded(runs):
    blind = [replace(r, blind=dict.fromkeys(r.old_tasks, 0.25) | {r.new_task: 1.0}) for r in runs if r.role == "final"]
    rows = summarise(blind)
    assert rows[0].blind.value == 0.25
    assert rows[0].blind.low < 0.25 < rows[0].blind.high
    assert {row.blind for row in rows[1:]} == {None}
    assert summarise(runs)[0].blind is None


def test_the_new_task_is_compared_with_plain_fine_tuning_from_the_same_starts(runs):
    ours, plain = ([r for r in runs if (r.method, r.frames, r.role) == (m, 0, "final")] for m in ("craft", "naive"))
    rows = {row.method: row for row in summarise(with_episodes([*ours, *plain]))}
    lost = [a.after[a.new_task] - b.after[b.new_task] for a, b in zip(ours, plain, strict=True)]
    found = rows["craft"].new_vs_plain
    assert found.value == pytest.approx(sum(lost) / 9)
    assert found.low < found.value < found.high
    assert rows["naive"].new_vs_plain is rows["base"].new_vs_plain is None
    unpaired = {row.method: row for row in summarise([*ours, *plain])}["craft"].new_vs_plain
    assert unpaired.value == pytest.approx(found.value)


def test_without_plain_fine_tuning_of_every_base_and_as_many_steps_there_is_no_difference(runs):
    ours, plain = ([r for r in runs if (r.method, r.frames, r.role) == (m, 0, "final")] for m in ("craft", "naive"))
    for partners in ([], plain[1:], [replace(r, steps=1600) for r in plain]):
        assert row_of(summarise([*ours, *partners]), "craft").new_vs_plain is None


def test_runs_with_other_rollouts_tiers_or_views_are_not_averaged(runs):
    own = [r for r in runs if r.method == "naive" and r.role == "final"]
    given = [{"tier": "nothing"}, {"tier": "instructions"}, {"tier": "rollouts", "rollouts": 3}]
    given += [{"tier": "rollouts", "rollouts": 10}, {"tier": "nothing", "view": "seen"}]
    rows = [row for row in summarise(replace(r, **fields) for fields in given for r in own) if row.method != "base"]
    assert [(row.tier, row.rollouts, row.view, row.n_runs) for row in rows] == [
        ("nothing", 0, "told", 9),
        ("instructions", 0, "told", 9),
        ("rollouts", 3, "told", 9),
        ("rollouts", 10, "told", 9),
        ("nothing", 0, "seen", 9),
    ]


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
