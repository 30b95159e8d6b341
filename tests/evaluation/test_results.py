import json
from dataclasses import replace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Filmstrip, check_runs, read_results, write_results
from lerobot_craft.evaluation.summary import collect
from tests.evaluation.made_results import METHODS, made_runs, made_sequences, with_episodes


@pytest.fixture(scope="module")
def results():
    runs = [*made_runs(seeds=(0, 1), policies=("smolvla",)), *made_sequences(seeds=(0,))]
    media = [Filmstrip("open it", "before.png", None, "craft.png")]
    return collect(runs, command="craft bench", settings={"episodes": 20, "nested": {"a": [1, None]}}, media=media)


@pytest.fixture
def path(tmp_path, results):
    write_results(tmp_path / "results.json", results)
    return tmp_path / "results.json"


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_what_is_written_is_read(path, results):
    assert read_results(path) == results


def test_runs_that_are_read_have_the_summary_that_was_written(path, results):
    again = collect(read_results(path).runs, command="", settings={})
    assert again.summary == results.summary
    assert again.sequences == results.sequences
    assert again.correlations == results.correlations


def test_the_file_has_the_fields_that_others_read(path):
    content = json.loads(path.read_text())
    assert content["schema"] == 2
    assert {"craft_version", "created", "command", "settings", "runs", "summary", "correlations", "media"} < set(
        content
    )
    run = content["runs"][0]
    assert set(run) == {
        "method", "label", "seed", "policy", "scenario", "role", "new_task", "same_scene", "anchors", "base", "after",
        "stages", "n_episodes", "steps", "train_seconds", "step_overhead", "drift", "lambda_final", "eps_final", "knob",
        "command", "trunk", "view", "tier", "rollouts", "blind", "base_episodes", "after_episodes", "starts_by_seed",
    }  # fmt: skip
    assert {"source", "frames", "bytes", "cached_bytes"} < set(run["anchors"])
    assert {"action", "hidden"} < set(run["drift"])
    assert set(content["summary"][0]["old_mean"]) == {"value", "low", "high"}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda c: c.update(schema=1),
            "is no results file of this release: schema: this release reads schema 2, the file has 1",
        ),
        (lambda c: c.pop("schema"), "the file has None"),
        (lambda c: c["runs"][3].update(colour="red"), r"runs\[3\].colour: unknown field"),
        (lambda c: c["runs"][0].pop("steps"), r"runs\[0\].steps: missing field"),
        (lambda c: c["runs"][0]["anchors"].pop("bytes"), r"runs\[0\].anchors.bytes: missing field"),
        (lambda c: c["runs"][0].update(seed="0"), r"runs\[0\].seed: expected int, got str"),
        (lambda c: c["runs"][0].update(role="test"), r"runs\[0\].role: expected one of tuning, final"),
        (lambda c: c["summary"][0]["new"].update(value=None), r"summary\[0\].new.value: expected float, got null"),
    ],
)
def test_a_file_that_is_not_schema_2_is_refused_by_field(path, edit, said):
    change(path, edit)
    with pytest.raises(CraftError, match=said):
        read_results(path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"schema": 1, "schema": 1}', '{"schema": NaN}'])
def test_text_that_is_no_strict_json_is_refused(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_text(text)
    with pytest.raises(CraftError, match="no results file"):
        read_results(path)


def test_frames_of_a_sequence_are_of_each_task_and_the_file_has_all_of_them():
    (run,) = made_sequences(seeds=(0,), methods=METHODS[1:2])
    assert (run.frames, run.anchors.frames) == (20, 200)
    fewer_there_than_asked_for = replace(run, anchors=replace(run.anchors, frames=193))
    assert fewer_there_than_asked_for.frames == 20
    assert replace(run, anchors=replace(run.anchors, all_frames=True)).frames is None


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CraftError, match=r"nowhere\.json: there is no such file"):
        read_results(tmp_path / "nowhere.json")


def rate(run, table, task, value):
    return replace(run, **{table: getattr(run, table) | {task: value}})


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda r: rate(r, "after", "reach", 1.2), "success rate of 'reach' is 1.2"),
        (lambda r: rate(r, "base", "reach", -0.1), "success rate of 'reach' is -0.1"),
        (lambda r: rate(r, "after", "juggle", 1.0), "base and after differ in the task 'juggle'"),
        (lambda r: replace(r, n_episodes=0), "n_episodes is 0"),
        (lambda r: replace(r, new_task="juggle"), "the new task 'juggle' has no success rate"),
        (
            lambda r: replace(r, same_scene=["reach", r.new_task]),
            "the same-scene task 'window-close' is none of the old tasks",
        ),
        (lambda r: replace(r, same_scene=["reach", "reach"]), "same_scene names a task twice"),
        (lambda r: replace(r, blind={"juggle": 0.5}), "blind has the task 'juggle', which base has not"),
        (lambda r: replace(r, blind={"reach": 1.5}), "success rate of 'reach' is 1.5"),
        (lambda r: replace(r, rollouts=-1), "rollouts is -1"),
        (lambda r: replace(r, rollouts=3), "rollouts is 3 in the tier None"),
        (lambda r: replace(r, tier="rollouts"), "rollouts is 0 in the tier 'rollouts'"),
        (
            lambda r: replace(r, tier="instructions", anchors=replace(r.anchors, frames=20)),
            "'instructions' has no old fr",
        ),
        (lambda r: replace(r, stages=[]), "a sequence needs stages"),
        (lambda r: replace(r, same_scene=[], base={r.new_task: 0.0}, after={r.new_task: 1.0}), "no old task"),
    ],
)
def test_a_run_that_cannot_be_is_refused(edit, said):
    run = made_runs(seeds=(0,), policies=("smolvla",), scenes=["window"])[0]
    with pytest.raises(CraftError, match=said):
        check_runs([edit(run)])


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda e: e.pop("reach"), "after and after_episodes differ in the task 'reach'"),
        (lambda e: e.update(juggle="1" * 20), "after and after_episodes differ in the task 'juggle'"),
        (lambda e: e.update(reach="1" * 19), "after_episodes of 'reach' is '1111111111111111111', expected 20 char"),
        (lambda e: e.update(reach="1" * 19 + "x"), "expected 20 characters 0 or 1"),
        (lambda e: e.update(reach="1" * 20), "after has 0.4 for 'reach', but after_episodes has 1.0"),
    ],
)
def test_episodes_that_are_not_those_of_the_rates_are_refused(edit, said):
    (made, *_) = made_runs(seeds=(0,), policies=("smolvla",), scenes=["window"])
    (run,) = with_episodes([rate(made, "after", "reach", 0.4)])
    check_runs([run])
    edit(run.after_episodes)
    with pytest.raises(CraftError, match=said):
        check_runs([run])


def test_episodes_are_written_and_read(tmp_path):
    runs = with_episodes(made_runs(seeds=(0, 1), policies=("smolvla",), scenes=["window"], methods=METHODS[:2]))
    written = collect(runs, command="", settings={})
    write_results(tmp_path / "results.json", written)
    read = read_results(tmp_path / "results.json")
    assert read == written
    assert collect(read.runs, command="", settings={}).summary == written.summary


def test_elsewhere_are_the_old_tasks_of_other_scenes():
    run = made_runs(seeds=(0,), policies=("smolvla",), scenes=["window"])[0]
    assert (run.same_scene, run.elsewhere) == (["window-open"], ["reach", "button-press", "door-lock", "plate-slide"])
    assert replace(run, same_scene=run.old_tasks).elsewhere == []
    assert replace(run, same_scene=[]).elsewhere == run.old_tasks


def test_frames_of_rollouts_are_no_setting():
    run = made_runs(seeds=(0,), policies=("smolvla",), scenes=["window"], methods=METHODS[1:2])[0]
    given = replace(run, tier="rollouts", rollouts=3)
    assert given.frames == 0
    assert replace(given, anchors=replace(given.anchors, all_frames=True)).frames == 0, "all of them are three episodes"


def test_runs_that_differ_in_what_they_see_or_were_given_are_not_the_same_run():
    run = made_runs(seeds=(0,), policies=("smolvla",), scenes=["window"])[0]
    given = [replace(run, tier="rollouts", rollouts=count) for count in (1, 3)]
    check_runs([run, replace(run, view="seen"), replace(run, tier="instructions"), *given])


def test_the_same_run_twice_is_refused():
    runs = made_runs(seeds=(0,), policies=("smolvla",))
    with pytest.raises(CraftError, match="is there twice"):
        check_runs([*runs, runs[5]])


def test_reading_checks_the_runs_too(path):
    change(path, lambda c: c["runs"][0]["after"].update(reach=7))
    with pytest.raises(CraftError, match="success rate of 'reach' is 7"):
        read_results(path)


def test_what_cannot_be_written_leaves_the_former_file(path, results):
    before = path.read_bytes()
    with pytest.raises(CraftError, match=r"was not written: settings\.x"):
        write_results(path, replace(results, settings={"x": float("nan")}))
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]
