"""What is told apart by what it is, and what is said of a path that cannot be shown."""

import json

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.matrix import write_evaluation
from lerobot_craft.evaluation.results import write_results
from lerobot_craft.evaluation.summary import collect
from lerobot_craft.report.inputs import load_inputs
from tests.evaluation.made_results import METHODS, made_runs
from tests.evaluation.test_matrix import made
from tests.report.made_training import made_training


@pytest.fixture
def bench(tmp_path):
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:2], scenes=["window"])
    (tmp_path / "bench").mkdir()
    write_results(tmp_path / "bench" / "results.json", collect(runs, command="craft bench", settings={}))
    return tmp_path / "bench"


@pytest.fixture
def evaluation(tmp_path):
    (tmp_path / "eval").mkdir()
    write_evaluation(tmp_path / "eval" / "evaluation.json", made())
    return tmp_path / "eval"


def test_directories_and_files_of_every_kind_are_mixed_in_their_order(bench, evaluation, tmp_path):
    first, second = (made_training(tmp_path / name / "run") for name in ("b", "a"))
    found = load_inputs([first, evaluation, bench / "results.json", second])
    assert [run.name for run in found.trainings] == ["b/run", "a/run"]
    assert (len(found.sources), len(found.evaluations)) == (1, 1)


def test_files_are_known_by_their_content(bench, evaluation, tmp_path):
    dated = [tmp_path / "bench-2026.json", tmp_path / "eval-2026.json"]
    (bench / "results.json").rename(dated[0])
    (evaluation / "evaluation.json").rename(dated[1])
    found = load_inputs(dated)
    assert (len(found.sources), len(found.evaluations)) == (1, 1)


def test_a_directory_may_hold_several(evaluation):
    made_training(evaluation / "in_it").joinpath("metrics.jsonl").rename(evaluation / "metrics.jsonl")
    found = load_inputs([evaluation])
    assert (len(found.evaluations), len(found.trainings)) == (1, 1)


def test_nothing_is_shown_twice(evaluation):
    with pytest.raises(CraftError, match=r"evaluation\.json is given twice"):
        load_inputs([evaluation, evaluation / "evaluation.json"])


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no such file or directory. Give the output directory of `craft train`"),
        ({}, "there is nothing in it to show. Give the output directory"),
        ({"evaluation.json": "{"}, r"evaluation\.json is no evaluation of this release"),
        ({"results.json": "{}"}, r"results\.json is no results file of this release"),
        ({"metrics.jsonl": ""}, r"metrics\.jsonl: there is no logged step in it yet"),
        ({"metrics.jsonl": "{}\n"}, r"metrics\.jsonl, line 1: it is damaged"),
        ({"metrics.jsonl": '{"step": 1, "lambda": "3"}\n'}, r"metrics\.jsonl, step 1: lambda is no number \('3'\)"),
        (
            {"metrics.jsonl": '{"step": 1}\n', "lambda_history.csv": "step\nx\n"},
            r"lambda_history\.csv, line 2: it is dam",
        ),
        (
            {"metrics.jsonl": '{"step": 1}\n', "module_cosines.csv": "step,cos/a\n1\n"},
            r"module_cosines\.csv, line 2: it",
        ),
        ({"metrics.jsonl": '{"step": 1}\n', "run.json": '{"schema": 2}'}, r"run\.json is no record of this release"),
    ],
)
def test_what_is_missing_or_damaged_is_named(content, complaint, tmp_path):
    for name, text in (content or {}).items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CraftError, match=complaint):
        load_inputs([tmp_path if content is not None else tmp_path / "nowhere"])


@pytest.mark.parametrize("text", ["no json", json.dumps({"some": "thing"}), "[]"])
def test_a_file_of_another_kind_is_refused(text, tmp_path):
    (tmp_path / "some.json").write_text(text)
    with pytest.raises(CraftError, match=r"some\.json holds no results, evaluation or listening"):
        load_inputs([tmp_path / "some.json"])


def test_an_evaluation_without_an_entry_is_not_shown(tmp_path):
    write_evaluation(tmp_path / "evaluation.json", made(rows=[], learned=[]))
    with pytest.raises(CraftError, match="nothing is played in it yet"):
        load_inputs([tmp_path])
