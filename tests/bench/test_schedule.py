import multiprocessing
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch

from lerobot_craft.bench import cell_files, schedule
from lerobot_craft.bench.cell_files import CellBusyError, CellResult, begin, finish
from lerobot_craft.bench.cell_plan import plan_cells
from lerobot_craft.bench.schedule import run_cells
from lerobot_craft.errors import CraftError


class Log:
    """Writes down what a watcher is told."""

    def __init__(self):
        self.told = []

    def kept(self, cell, result):
        self.told.append(("kept", cell.name))

    def outdated(self, cell, reason):
        self.told.append(("outdated", cell.name, reason))

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


@contextmanager
def threads(count):
    """This many for torch, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_every_cell_is_run_in_order(bench_settings, cells_that, log):
    settings = bench_settings()
    cells_that(lambda cell: CellResult(1.0))
    results = run_cells(settings, print, 1, log)
    assert list(results) == [cell.digest for cell in plan_cells(settings)]
    assert [event[0] for event in log.told] == ["started", "finished"] * 6


def test_a_finished_cell_is_kept(bench_settings, cells_that, log):
    settings = bench_settings()
    demos = plan_cells(settings)[0]
    begin(demos)
    finish(demos, CellResult(2.0))
    cells_that(lambda cell: CellResult(1.0))
    assert run_cells(settings, print, 1, log)[demos.digest].seconds == 2.0
    assert log.told[0] == ("kept", demos.name)
    assert ("started", demos.name) not in log.told


def test_a_cell_of_another_version_is_run_again_and_said(bench_settings, cells_that, log, monkeypatch):
    settings = bench_settings()
    trial = plan_cells(settings)[-1]
    begin(trial)
    finish(trial, CellResult(2.0))
    monkeypatch.setattr(cell_files, "__version__", "9.8.7")
    cells_that(lambda cell: CellResult(1.0))
    assert run_cells(settings, print, 1, log)[trial.digest].seconds == 1.0
    assert log.told[0] == ("outdated", trial.name, cell_files.outdated(trial))
    assert ("started", trial.name) in log.told


def test_a_failure_stops_only_what_needs_it(bench_settings, cells_that, log):
    settings = bench_settings(seeds=(0, 1), methods=("naive",))

    def work(cell):
        if (cell.kind, cell.name) == ("base", "reach-smolvla-seed0"):
            raise CraftError("the disk is full")
        if cell.name == "reach-smolvla-naive-seed1":
            raise ZeroDivisionError("in the middle\nof it")
        return CellResult(1.0)

    cells_that(work)
    assert len(run_cells(settings, print, 1, log)) == 4  # the demonstrations, and the base of seed 1 with its trial
    assert [event[1:] for event in log.told if event[0] == "failed"] == [
        ("reach-smolvla-seed0", "the disk is full"),
        ("reach-smolvla-naive-seed0", "it needs base reach-smolvla-seed0"),
        ("reach-smolvla-seed0", "it needs base reach-smolvla-seed0"),  # its trial
        ("reach-smolvla-naive-seed1", "ZeroDivisionError: in the middle"),
    ]


def test_a_cell_that_somebody_else_is_at_is_asked_for_again(bench_settings, cells_that, log, monkeypatch):
    monkeypatch.setattr("lerobot_craft.bench.schedule._ASK_AGAIN_S", 0.0)
    asked = []

    def work(cell):
        asked.append(cell.name)
        if asked.count(cell.name) < 3 and cell.kind == "base":
            raise CellBusyError("elsewhere")
        return CellResult(1.0)

    cells_that(work)
    assert len(run_cells(bench_settings(methods=("naive",)), print, 1, log)) == 5
    assert asked.count("reach-smolvla-seed0") == 4  # its trial is one of them
    assert log.told.count(("postponed", "reach-smolvla-seed0")) == 2


def test_cells_have_one_thread_each_and_afterwards_all_is_as_it_was(bench_settings, cells_that, log, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen = []
    cells_that(lambda cell: seen.append((torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])) or CellResult(1.0))
    with threads(3):
        run_cells(bench_settings(), print, 1, log)
        assert set(seen) == {(1, "1")}
        assert (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]) == (3, "7")


def test_an_interruption_ends_it_at_once(bench_settings, cells_that, log):
    def work(cell):
        if cell.kind == "base":
            raise KeyboardInterrupt
        return CellResult(1.0)

    cells_that(work)
    with pytest.raises(KeyboardInterrupt):
        run_cells(bench_settings(), print, 1, log)
    assert log.told[-1] == ("started", "reach-smolvla-seed0")


@pytest.fixture
def asked_worker(bench_settings, monkeypatch):
    """Function from names of scenarios and a digest to what a worker answers; it lives in this process."""
    monkeypatch.setattr(schedule.signal, "signal", lambda *_: None)

    def ask(scenarios, digest):
        ours, theirs = multiprocessing.Pipe()
        answers = []

        def parent():
            with ours:
                ours.send(digest)
                answers.append(ours.recv())

        asking = threading.Thread(target=parent)
        asking.start()
        schedule._work(theirs, bench_settings(scenarios=scenarios), print)
        asking.join()
        return answers[0]

    return ask


def test_a_worker_runs_the_cells_that_it_knows(asked_worker, bench_settings, cells_that):
    cells_that(lambda cell: CellResult(1.0, command=cell.name))
    demos = plan_cells(bench_settings())[0]
    assert asked_worker(("reach",), demos.digest) == ("finished", CellResult(1.0, command="reach"))


@pytest.mark.parametrize("scenario", ["mine", "reach"], ids=["not there", "not as it was"])
def test_a_cell_that_a_worker_cannot_know_is_said_in_a_sentence(asked_worker, scenario):
    state, reason = asked_worker((scenario,), "digest of a cell that only the parent knows")
    assert state == "failed"
    assert reason.startswith("worker processes do not know this cell. They import your script anew")


@pytest.mark.slow  # three processes import torch
@pytest.mark.timeout(400)
def test_a_scenario_below_the_guard_of_a_script_is_one_that_workers_cannot_know(tmp_path):
    (tmp_path / "own.py").write_text("""
from lerobot_craft.bench.scenarios import SCENARIOS, Scenario
from lerobot_craft.cli.bench import run

if __name__ == "__main__":
    SCENARIOS["mine"] = Scenario("mine", "tuning", old=("reach-red",), new=("button-topdown",))
    raise SystemExit(run(["--scenario=mine", "--methods=naive", "--seeds=0", "--jobs=2", "--output_dir=here"]))
""")
    ended = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=350)
    assert ended.returncode == 1
    first, *others = ended.stderr.splitlines()
    assert first == f"demos mine was not run to its end: {schedule._UNKNOWN}"
    assert [line.partition(": ")[2] for line in others] == ["it needs demos mine"] * 2


@pytest.mark.timeout(300)
def test_a_worker_that_is_stopped_takes_its_semaphores_with_it(tmp_path):
    (tmp_path / "own.py").write_text("""
from multiprocessing import get_context
from pathlib import Path
from lerobot_craft.bench.demo_run import demo_settings
from lerobot_craft.bench.schedule import _Worker

if __name__ != "__main__":
    LOCK = get_context("spawn").Lock()  # as progress bars have one
else:
    worker = _Worker(demo_settings(Path("here"), quick=True, film=False), print)
    worker._connection.send("no digest of a cell")
    worker._connection.recv()
    worker.stop()
""")
    ended = subprocess.run([sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert (ended.returncode, ended.stderr) == (0, "")


class Pipe:
    """A worker's end of a pipe on which nothing comes but its end."""

    def __init__(self, *, idle):
        self._idle = idle

    def poll(self, seconds):
        return not self._idle

    def recv(self):
        raise EOFError


@pytest.mark.parametrize("idle", [True, False])
def test_a_worker_without_a_cell_imports_meanwhile(idle, bench_settings, monkeypatch):
    imported = []
    monkeypatch.setattr(schedule, "_import_ahead", imported.append)
    monkeypatch.setattr(schedule.signal, "signal", lambda *_: None)
    settings = bench_settings()
    schedule._work(Pipe(idle=idle), settings, None)
    assert imported == ([settings] if idle else [])


def test_importing_ahead_says_nothing(bench_settings, capfd):
    schedule._import_ahead(bench_settings())
    assert "lerobot.policies.smolvla.modeling_smolvla" in sys.modules
    schedule._import_ahead(bench_settings(policies=("no_such_policy_is_known",)))
    assert capfd.readouterr() == ("", "")
