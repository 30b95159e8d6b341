"""`craft report` as a person runs it."""

import subprocess
import sys

import pytest

from lerobot_craft.cli.report import run
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import write_results
from lerobot_craft.evaluation.summary import collect
from tests.evaluation.made_results import METHODS, made_runs
from tests.report.made_training import made_training


@pytest.fixture
def results(tmp_path):
    runs = made_runs(seeds=(0, 1), policies=("smolvla",), methods=METHODS[:3], scenes=["window"])
    write_results(tmp_path / "results.json", collect(runs, command="craft bench", settings={}))
    return tmp_path / "results.json"


def test_the_page_lies_beside_the_results_and_the_table_is_printed(results, capsys):
    assert run([str(results)]) == 0
    page = results.with_name("report.html")
    assert page.read_text().startswith("<!DOCTYPE html>")
    printed = capsys.readouterr().out
    assert "| no old frames | plain fine-tuning | " in printed
    assert printed.rstrip().endswith(str(page))


def test_the_page_goes_where_it_is_told(results, tmp_path):
    assert run([str(results), f"--output={tmp_path / 'page.html'}"]) == 0
    assert (tmp_path / "page.html").exists()
    assert not results.with_name("report.html").exists()


def test_results_are_never_overwritten(results):
    before = results.read_bytes()
    with pytest.raises(CraftError, match="is one of the results"):
        run([str(results), f"--output={results.parent / '.' / results.name}"])
    with pytest.raises(CraftError, match="is one of the results"):
        run([str(results), f"--output={results.parent / '..' / results.parent.name / results.name}"])
    assert results.read_bytes() == before


def test_a_directory_that_is_not_there_is_named(results, tmp_path):
    with pytest.raises(CraftError, match=r"^--output=.*there is no directory .*nowhere\. Make it first"):
        run([str(results), f"--output={tmp_path / 'nowhere' / 'page.html'}"])
    with pytest.raises(CraftError, match="no such file"):
        run([str(tmp_path / "other.json")])


def test_a_training_and_results_become_one_page_in_the_trainings_directory(results, tmp_path, capsys):
    training = made_training(tmp_path / "run")
    assert run([str(training), str(results.parent)]) == 0
    page = (training / "report.html").read_text()
    assert "Drift, budget and multipliers" in page
    assert "What is kept, what is learnt" in page
    assert capsys.readouterr().out.rstrip().endswith(str(training / "report.html"))


def test_a_training_alone_prints_where_its_page_is(tmp_path, capsys):
    training = made_training(tmp_path / "run")
    assert run([str(training)]) == 0
    assert capsys.readouterr().out == f"{training / 'report.html'}\n"


def test_a_trainings_own_files_are_never_overwritten(tmp_path):
    training = made_training(tmp_path / "run")
    with pytest.raises(CraftError, match="is one of the results"):
        run([str(training), f"--output={training / 'metrics.jsonl'}"])


def test_a_page_needs_neither_torch_nor_lerobot(results, tmp_path):
    paths = [str(results), str(made_training(tmp_path / "run"))]
    code = f"import sys; from lerobot_craft.cli.report import run; run({paths!r}); print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    loaded = {name.split(".")[0] for name in printed.splitlines()[-1].split()}
    assert "numpy" in loaded
    assert not {"torch", "lerobot", "scipy"} & loaded
