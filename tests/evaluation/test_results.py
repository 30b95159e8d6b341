import json
from dataclasses import replace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Filmstrip, check_runs, read_results, write_results
from lerobot_craft.evaluation.summary import collect
from tests.evaluation.made_results import METHODS, made_runs, made_sequences


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
    assert content["schema"] == 1
    assert {"craft_version", "created", "command", "settings", "runs", "summary", "correlations", "media"} < set(
        content
    )
    run = content["runs"][0]
    assert set(run) == {
        "method", "label", "seed", "policy", "scenario", "role", "new_task", "same_scene", "anchors", "base", "after",
        "stages", "n_episodes", "steps", "train_seconds", "step_overhead", "drift", "lambda_final", "eps_final", "knob",
        "command", "trunk",
    }  # fmt: skip
    assert {"source", "frames", "bytes", "cached_bytes"} < set(run["anchors"])
    assert {"action", "hidden"} < set(run["drift"])
    assert set(content["summary"][0]["old_mean"]) == {"value", "low", "high"}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda c: c.update(schema=2), "reads schema 1, the file has 2"),
        (lambda c: c.pop("schema"), "the file has None"),
        (lambda c: c["runs"][3].update(colour="red"), r"runs\[3\].colour: unknown field"),
        (lambda c: c["runs"][0].pop("steps"), r"runs\[0\].steps: missing field"),
        (lambda c: c["runs"][0]["anchors"].pop("bytes"), r"runs\[0\].anchors.bytes: missing field"),
        (lambda c: c["runs"][0].update(seed="0"), r"runs\[0\].seed: expected int, got str"),
        (lambda c: c["runs"][0].update(role="test"), r"runs\[0\].role: expected one of tuning, final"),
        (lambda c: c["summary"][0]["new"].update(value=None), r"summary\[0\].new.value: expected float, got null"),
    ],
)
def test_a_file_that_is_not_schema_1_is_refused_by_field(path, edit, said):
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
        (lambda r: replace(r, same_scene=r.new_task), "is none of the old tasks"),
        (lambda r: replace(r, stages=[]), "a sequence needs stages"),
        (lambda r: replace(r, same_scene=None, base={r.new_task: 0.0}, after={r.new_task: 1.0}), "no old task"),
    ],
)
def test_a_run_that_cannot_be_is_refused(edit, said):
    run = made_runs(seeds=(0,), policies=("smolvla",))[0]
    with pytest.raises(CraftError, match=said):
        check_runs([edit(run)])


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
