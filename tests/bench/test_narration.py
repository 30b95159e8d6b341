import io
import os
import time

import pytest

from lerobot_craft.bench.board import Narrator, describe_cell, how_far
from lerobot_craft.bench.cell_files import LOG_FILE, CellResult, begin
from lerobot_craft.bench.cell_plan import plan_cells
from lerobot_craft.training.journal import METRICS_FILE


@pytest.fixture
def cells(bench_settings):
    return plan_cells(bench_settings(anchors=(0, 20)))


def test_each_stage_is_told_in_words(bench_settings):
    assert [describe_cell(cell) for cell in plan_cells(bench_settings(anchors=(0, 20), film=True))] == [
        "record demonstrations: 50 of each of 1 old tasks",
        "record demonstrations: 30 of the new one",
        "train a small smolvla on the old tasks",
        "fine-tune it on the new task plainly, roll it out",
        "fine-tune it on the new task with CRaFT, no old frame, roll it out",
        "fine-tune it on the new task with CRaFT, 20 old frames, roll it out",
        "roll it out before fine-tuning",
        "film a rollout before fine-tuning",
        "film a rollout after fine-tuning plainly",
        "film a rollout after fine-tuning with CRaFT, no old frame",
        "film a rollout after fine-tuning with CRaFT, 20 old frames",
    ]


def test_without_a_terminal_a_stage_has_a_line_at_its_start_and_one_at_its_end(cells):
    stream = io.StringIO()
    narrator = Narrator(cells, stream, live=False)
    narrator.kept(cells[0], CellResult(12.4))
    for cell in cells[2:4]:
        narrator.started(cell)
    narrator.tick()
    narrator.finished(cells[3], CellResult(1.0))
    narrator.close()
    assert stream.getvalue().splitlines() == [
        f"[1/7]   12 s  {describe_cell(cells[0])} (done earlier)",
        f"[3/7] {describe_cell(cells[2])}",
        f"[4/7] {describe_cell(cells[3])}",
        "[4/7] done in 0 s",
    ]


def test_what_is_done_again_says_why(cells):
    stream = io.StringIO()
    Narrator(cells, stream, live=False).outdated(cells[1], "it was made by version 0.0.1")
    assert stream.getvalue() == f"[2/7] again, {describe_cell(cells[1])}: it was made by version 0.0.1\n"


def test_on_a_terminal_a_running_stage_is_drawn_over_itself(cells, monkeypatch):
    monkeypatch.setattr("lerobot_craft.bench.board._REDRAW_S", 0.0)
    monkeypatch.setenv("COLUMNS", "50")
    stream = io.StringIO()
    narrator = Narrator(cells, stream, live=True)
    narrator.started(cells[2])
    narrator.tick()
    assert stream.getvalue().count("\x1b[1F\x1b[J") == 1
    assert {len(line) for line in stream.getvalue().replace("\x1b[1F\x1b[J", "").splitlines()} == {49}
    narrator.finished(cells[2], CellResult(1.0))
    narrator.close()
    assert stream.getvalue().endswith(f"\x1b[1F\x1b[J[3/7]    0 s  {describe_cell(cells[2])}\n")  # whole, and it stays


def test_a_training_tells_its_step(cells):
    base = cells[2]
    assert how_far(cells[0], 10.0) == how_far(base, 10.0) == ""
    base.output_dir.mkdir(parents=True)
    records = base.output_dir / METRICS_FILE
    records.write_text('{"step": 125}\n{"step": 250}\n')
    assert how_far(base, 10.0) == ", step 250 of 4000"
    an_hour_ago = time.time() - 3600
    os.utime(records, (an_hour_ago, an_hour_ago))
    assert how_far(base, 10.0) == ""  # of a training that was interrupted


def test_a_failure_names_its_log(cells):
    narrator = Narrator(cells, io.StringIO(), live=False)
    begin(cells[1])
    (cells[1].directory / LOG_FILE).touch()
    narrator.failed(cells[1], "no such luck")
    assert narrator.failures == [
        f"[2/7] {describe_cell(cells[1])}: no such luck (log: {cells[1].directory / LOG_FILE})"
    ]
