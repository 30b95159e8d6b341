import io

import pytest

from lerobot_craft.bench.board import Board, means, same_scene
from lerobot_craft.bench.cell_files import LOG_FILE, CellResult, begin
from lerobot_craft.bench.cell_plan import plan_cells, plan_runs


@pytest.fixture
def cells(bench_settings):
    return plan_cells(bench_settings(methods=("naive",), seeds=(0,)))


def rates(old, new):
    return CellResult(61.4, successes={"reach-red": [True] * old + [False] * (4 - old), "reach-blue": [True] * new})


def test_without_a_terminal_each_cell_is_one_line(cells):
    stream = io.StringIO()
    board = Board(cells, stream, live=False)
    board.started(cells[3])
    board.tick()
    board.finished(cells[3], rates(1, 4))
    board.close()
    assert stream.getvalue() == "[1/5] run reach-smolvla-naive-seed0: old 0.25, same scene 0.25, new 1.00; 61 s\n"


def test_a_result_that_does_not_count_any_more_is_said(cells):
    stream = io.StringIO()
    Board(cells, stream, live=False).outdated(cells[3], "it was made by version 0.0.1")
    assert stream.getvalue() == "run reach-smolvla-naive-seed0 is run again: it was made by version 0.0.1\n"


def test_a_failure_names_its_log(cells):
    stream = io.StringIO()
    board = Board(cells, stream, live=False)
    board.failed(cells[2], "it fell over")
    begin(cells[3])
    (cells[3].directory / LOG_FILE).touch()
    board.failed(cells[3], "it fell over")
    assert "log" not in board.failures[0]
    assert board.failures[1].endswith(f"it fell over (log: {cells[3].directory / LOG_FILE})")
    assert stream.getvalue().splitlines() == board.failures


def test_on_a_terminal_the_table_is_drawn_over_itself(cells, monkeypatch):
    monkeypatch.setattr("lerobot_craft.bench.board._REDRAW_S", 0.0)
    stream = io.StringIO()
    board = Board(cells, stream, live=True)
    board.started(cells[3])
    assert "run reach-smolvla-naive-seed0: 0 s\n" in stream.getvalue()
    board.tick()
    assert stream.getvalue().count("\x1b[2F\x1b[J") == 1  # two lines up, and clear
    board.finished(cells[3], rates(4, 4))
    board.tick()
    board.close()
    assert stream.getvalue().endswith("\x1b[J")  # nothing of the live part stays


def test_means_are_over_the_runs_of_a_method(bench_settings):
    runs = plan_runs(bench_settings(methods=("naive", "craft"), seeds=(0, 1)))
    lines = means([(run, rates(2 * run.base.seed, 4)) for run in runs])
    assert [line.split() for line in lines[1:]] == [
        ["smolvla", "craft", "0", "-", "2", "0.25", "0.25", "1.00"],
        ["smolvla", "naive", "0", "-", "2", "0.25", "0.25", "1.00"],
    ]


def test_a_task_of_the_same_scene_counts_only_among_the_old_ones(bench_settings, two_stages):
    (run,) = plan_runs(bench_settings(scenarios=(two_stages,), methods=("naive",)))
    assert same_scene(run) == ["reach-red"]
    assert same_scene(run.before) == []
