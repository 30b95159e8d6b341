"""The bench page's figure is what its script makes of the committed results."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from lerobot_craft.evaluation.results import read_results, write_results
from lerobot_craft.evaluation.summary import collect
from tests.evaluation.made_results import METHODS, made_runs
from tests.report.html_checks import assert_well_formed, outline

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "bench-smolvla-400-steps-2026-11-16.json"


@pytest.fixture(scope="module")
def figure():
    return runpy.run_path(str(ROOT / "benchmarks" / "figure.py"))


def test_the_committed_figure_is_that_of_the_committed_results(figure, tmp_path, capsys):
    assert figure["main"]([str(RESULTS), f"--output={tmp_path / 'new' / 'figure.svg'}"]) == 0
    made = (tmp_path / "new" / "figure.svg").read_bytes()
    assert made == (ROOT / "docs" / "figures" / "retention.svg").read_bytes(), (
        f"run python benchmarks/figure.py {RESULTS}"
    )


def test_it_is_one_picture_with_both_colour_schemes_and_nothing_from_elsewhere(figure):
    drawn = figure["draw"](figure["rows_of"](RESULTS))
    assert_well_formed(drawn)
    assert 'aria-label="Success with 95 % intervals. old skill, same scene: before fine-tuning 0.99' in drawn
    assert "prefers-color-scheme: dark" in drawn
    assert "href" not in drawn
    assert "url(" not in drawn


def test_it_is_drawn_from_the_runs_and_not_from_a_summary_of_them(figure, tmp_path):
    results = read_results(RESULTS)
    write_results(tmp_path / "r.json", replace(results, summary=[]))
    assert figure["rows_of"](tmp_path / "r.json") == figure["rows_of"](RESULTS)


def test_any_results_can_be_drawn(figure, tmp_path):
    runs = made_runs(seeds=(0,), scenes=["faucet"], methods=METHODS[:2])
    write_results(tmp_path / "r.json", collect(runs, command="", settings={}))
    rows = figure["rows_of"](tmp_path / "r.json", "pi0_fast")
    assert [(row.policy, row.method, row.frames) for row in rows] == [
        ("pi0_fast", "base", 0),
        ("pi0_fast", "naive", 0),
        ("pi0_fast", "er", 20),
    ]
    bars = [attributes for tag, attributes in outline(figure["draw"](rows)).tags if tag == "rect"]
    assert len(bars) == 3 * 3 + 3 + 1, "three groups of three, their legend, and the paper"


def test_what_cannot_be_drawn_is_said_in_a_sentence(figure, tmp_path, capsys):
    assert figure["main"]([str(RESULTS), "--policy=act", f"--output={tmp_path / 'f.svg'}"]) == 1
    assert (
        "there is nothing to compare in it of act. It needs the base and one of naive, er, craft"
        in capsys.readouterr().err
    )
    assert figure["main"]([str(tmp_path / "nowhere.json"), f"--output={tmp_path / 'f.svg'}"]) == 1
    assert not (tmp_path / "f.svg").exists()
