import pytest

from lerobot_craft.bench.cell_files import CellResult, Recorded
from lerobot_craft.bench.cell_plan import plan_cells, plan_runs
from lerobot_craft.bench.collecting import collect_runs
from lerobot_craft.bench.sweep import Sweep, check_scenarios, choose, read_sweep, sweep_lines, write_sweep
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.summary import collect


def finished(cell, **changes):
    if cell.kind == "rollouts":
        return CellResult(1.0, recorded=Recorded(150, 3000))
    if cell.kind == "demos":
        return CellResult(1.0, recorded=Recorded(200, 4000) if cell.is_old else Recorded(100, 2000))
    successes = {task: [True, False] for task in cell.tasks}
    values = {"train_seconds": 10.0, "step_seconds": 0.1, "command": f"craft train {cell.name}", **changes}
    return CellResult(2.0, successes=values.pop("successes", successes), **values)


def all_finished(settings, **changes):
    """Results of all cells; changes by the name of the method."""
    return {
        cell.digest: finished(cell, **(changes.get(cell.method.name, {}) if cell.kind == "run" else {}))
        for cell in plan_cells(settings)
    }


def collected(settings, results):
    return {(run.method, run.frames): run for run in collect_runs(plan_runs(settings), results, settings)}


def test_runs_say_what_they_kept_and_what_it_cost(bench_settings):
    settings = bench_settings(methods=("naive", "joint", "er", "craft"), anchors=(0, 20))
    results = all_finished(settings, er={"step_seconds": 0.15}, craft={"cached_bytes": 77, "lambda_final": 3.0})
    runs = collected(settings, results)
    assert runs["naive", 0].step_overhead is None
    assert runs["er", 20].step_overhead == pytest.approx(1.5)
    assert (runs["er", 20].anchors.frames, runs["er", 20].anchors.bytes) == (20, 400)
    assert (runs["joint", None].anchors.frames, runs["joint", None].anchors.bytes) == (200, 4000)
    assert [runs["craft", frames].anchors.source for frames in (0, 20)] == ["cross", "both"]
    assert runs["craft", 20].anchors.cached_bytes == 77
    assert runs["craft", 0].lambda_final == 3.0
    assert runs["craft", 0].same_scene == ["reach-red"]
    assert runs["naive", 0].command == "craft train reach-smolvla-naive-seed0"
    collect(runs.values(), command="craft bench", settings=settings.as_json())  # the results' own checks


def test_a_run_says_what_the_user_has_of_the_old_tasks(bench_settings):
    settings = bench_settings(methods=("naive", "joint", "er", "craft"), anchors=(0, 20), rollouts=(3,), view="seen")
    runs = collect_runs(plan_runs(settings), all_finished(settings), settings)
    collect(runs, command="craft bench", settings=settings.as_json())
    assert {(run.method, run.tier, run.rollouts, run.anchors.frames) for run in runs} == {
        ("naive", "nothing", 0, 0),
        ("joint", "everything", 0, 200),
        ("er", "frames", 0, 20),
        ("er", "rollouts", 3, 150),
        ("craft", "instructions", 0, 0),
        ("craft", "frames", 0, 20),
        ("craft", "rollouts", 3, 100),
    }
    assert {run.view for run in runs} == {"seen"}
    assert runs[0].after_episodes == {"reach-red": "10", "reach-blue": "10"}
    assert all(run.starts_by_seed for run in runs)


def test_what_a_blindfolded_base_can_do_is_told_of_every_run(bench_settings):
    settings = bench_settings(view="seen", methods=("naive",))
    results = all_finished(settings)
    (trial,) = (cell for cell in plan_cells(settings) if cell.kind == "trial")
    results[trial.digest] = finished(trial, blind={"reach-red": [True, False], "reach-blue": [False, False]})
    (run,) = collect_runs(plan_runs(settings), results, settings)
    assert run.blind == {"reach-red": 0.5, "reach-blue": 0.0}


def test_a_policy_without_instructions_has_its_anchors_from_old_frames(bench_settings):
    settings = bench_settings(policies=("act",), scenarios=("apart",), methods=("naive", "craft"), anchors=(0, 20))
    runs = collected(settings, all_finished(settings))
    assert {key: (run.anchors.source, run.same_scene) for key, run in runs.items()} == {
        ("naive", 0): (None, []),
        ("craft", 20): ("dataset", []),
    }


@pytest.mark.parametrize(("scenario", "trunk"), [("trio-door", "trio"), ("reach", None)])
def test_a_run_says_whose_base_it_shares(bench_settings, scenario, trunk):
    settings = bench_settings(scenarios=(scenario,), methods=("naive",), anchors=(0,))
    assert collected(settings, all_finished(settings))["naive", 0].trunk == trunk


def test_a_run_that_is_not_finished_is_left_out(bench_settings):
    settings = bench_settings()
    results = all_finished(settings)
    del results[plan_runs(settings)[1].digest]
    assert list(collected(settings, results)) == [("naive", 0)]


def test_a_sequence_is_one_run_with_stages(bench_settings, two_stages):
    settings = bench_settings(scenarios=(two_stages,), methods=("er",), anchors=(5,))
    (run,) = collected(settings, all_finished(settings)).values()
    assert [stage.task for stage in run.stages] == ["button-topdown", "reach-blue"]
    assert run.new_task == "reach-blue"
    assert (run.anchors.frames, run.anchors.bytes) == (10, 200)  # five of each task before the last
    assert run.frames == 5  # as --anchors has it, and the live board
    assert run.train_seconds == 20.0
    assert " && " in run.command


def test_a_whole_number_stays_one_through_a_file(tmp_path):
    write_sweep(tmp_path / "sweep.json", Sweep(["faucet"], {"lora": 4, "l2sp": 1}, {}))
    knobs = read_sweep(tmp_path / "sweep.json").knobs
    assert {name: repr(value) for name, value in knobs.items()} == {"lora": "4", "l2sp": "1.0"}


def test_a_sweep_takes_the_value_that_keeps_and_learns_most(bench_settings, tmp_path):
    settings = bench_settings(methods=("l2sp", "naive"), sweep=True)
    results = all_finished(settings)
    for run in plan_runs(settings):
        if run.knob == 0.1:
            results[run.digest] = finished(run, successes={"reach-red": [True, True], "reach-blue": [True, False]})
    sweep = choose(plan_runs(settings), results, settings)
    assert sweep.knobs == {"l2sp": 0.1}
    assert sweep.scores["l2sp"] == {"0.01": 0.5, "0.1": 0.75, "1": 0.5, "10": 0.5}
    assert "-> 0.1" in sweep_lines(sweep)[1]
    write_sweep(tmp_path / "sweep.json", sweep)
    assert read_sweep(tmp_path / "sweep.json") == sweep


def test_of_equal_values_a_methods_own_is_taken(bench_settings):
    settings = bench_settings(methods=("l2sp",), sweep=True)
    assert choose(plan_runs(settings), all_finished(settings), settings).knobs == {"l2sp": 0.01}


def test_chosen_knobs_are_used_and_say_where_they_were_chosen(bench_settings):
    settings = bench_settings(methods=("l2sp", "lwf"), knobs={"l2sp": 1.0}, swept_on=("faucet",))
    runs = collected(settings, all_finished(settings))
    assert (runs["l2sp", 0].knob.value, runs["l2sp", 0].knob.swept_on) == ("1", ["faucet"])
    assert (runs["lwf", 0].knob.value, runs["lwf", 0].knob.swept_on) == ("1", [])


def test_nothing_is_tuned_on_scenarios_of_the_table():
    check_scenarios(["faucet"])
    with pytest.raises(CraftError, match="--sweep on window would choose settings on a scenario that is kept"):
        check_scenarios(["faucet", "window"])


def test_a_sweep_of_another_release_is_refused(tmp_path):
    path = tmp_path / "sweep.json"
    path.write_text('{"swept_on": [], "knobs": {"naive": 1.0}, "scores": {}}')
    with pytest.raises(CraftError, match="no method with one"):
        read_sweep(path)
