import os

import pytest
import torch

from lerobot_craft.bench import schedule
from lerobot_craft.bench.plan import plan_cells
from lerobot_craft.bench.schedule import run_cells
from lerobot_craft.bench.store import CellBusyError, CellResult, begin, finish
from lerobot_craft.errors import CraftError


class Log:
    """Writes down what a watcher is told."""

    def __init__(self):
        self.told = []

    def kept(self, cell, result):
        self.told.append(("kept", cell.name))

    def started(self, cell):
        self.told.append(("started", cell.name))

    def finished(self, cell, result):
        self.told.append(("finished", cell.name))

    def postponed(self, cell):
        self.told.append(("postponed", cell.name))

    def failed(self, cell, reason):
        self.told.append(("failed", cell.name, reason))

    def tick(self):
        pass


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def cells_that(monkeypatch):
    """Lets a function stand for the work of a cell."""

    def behave(work):
        monkeypatch.setattr(schedule, "ensure", lambda cell, train, wait: work(cell))

    return behave


def test_every_cell_is_run_in_order(bench_settings, cells_that, log):
    settings = bench_settings()
    cells_that(lambda cell: CellResult(1.0))
    results = run_cells(settings, print, 1, log)
    assert list(results) == [cell.digest for cell in plan_cells(settings)]
    assert [event[0] for event in log.told] == ["started", "finished"] * 4


def test_a_finished_cell_is_kept(bench_settings, cells_that, log):
    settings = bench_settings()
    demos = plan_cells(settings)[0]
    begin(demos)
    finish(demos, CellResult(2.0))
    cells_that(lambda cell: CellResult(1.0))
    assert run_cells(settings, print, 1, log)[demos.digest].seconds == 2.0
    assert log.told[0] == ("kept", demos.name)
    assert ("started", demos.name) not in log.told


def test_a_failure_stops_only_what_needs_it(bench_settings, cells_that, log):
    settings = bench_settings(seeds=(0, 1), methods=("naive",))

    def work(cell):
        if cell.name == "reach-smolvla-seed0":
            raise CraftError("the disk is full")
        if cell.name == "reach-smolvla-naive-seed1":
            raise ZeroDivisionError("in the middle\nof it")
        return CellResult(1.0)

    cells_that(work)
    assert len(run_cells(settings, print, 1, log)) == 2  # the demonstrations, and the base of seed 1
    assert [event[1:] for event in log.told if event[0] == "failed"] == [
        ("reach-smolvla-seed0", "the disk is full"),
        ("reach-smolvla-naive-seed0", "it needs base reach-smolvla-seed0"),
        ("reach-smolvla-naive-seed1", "ZeroDivisionError: in the middle"),
    ]


def test_a_cell_that_somebody_else_is_at_is_asked_for_again(bench_settings, cells_that, log, monkeypatch):
    monkeypatch.setattr("lerobot_craft.bench.queue._ASK_AGAIN_S", 0.0)
    asked = []

    def work(cell):
        asked.append(cell.name)
        if asked.count(cell.name) < 3 and cell.kind == "base":
            raise CellBusyError("elsewhere")
        return CellResult(1.0)

    cells_that(work)
    assert len(run_cells(bench_settings(methods=("naive",)), print, 1, log)) == 3
    assert asked.count("reach-smolvla-seed0") == 3
    assert log.told.count(("postponed", "reach-smolvla-seed0")) == 2


def test_cells_have_one_thread_each_and_afterwards_all_is_as_it_was(bench_settings, cells_that, log, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = torch.get_num_threads()
    seen = []
    cells_that(lambda cell: seen.append((torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])) or CellResult(1.0))
    run_cells(bench_settings(), print, 1, log)
    assert set(seen) == {(1, "1")}
    assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (before, "7")


def test_an_interruption_ends_it_at_once(bench_settings, cells_that, log):
    def work(cell):
        if cell.kind == "base":
            raise KeyboardInterrupt
        return CellResult(1.0)

    cells_that(work)
    with pytest.raises(KeyboardInterrupt):
        run_cells(bench_settings(), print, 1, log)
    assert log.told[-1] == ("started", "reach-smolvla-seed0")
