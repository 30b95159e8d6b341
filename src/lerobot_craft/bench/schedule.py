"""Run all cells: in this process, or in workers that import lerobot once and keep their simulations.

Which cell is next: each after those it needs, none twice; a failure stops only those that need it.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from lerobot_craft.bench.cell_files import CellBusyError, CellResult, outdated, result_of
from lerobot_craft.bench.cell_plan import plan_cells
from lerobot_craft.bench.cell_run import Train, ensure, output_to
from lerobot_craft.bench.cells import Cell
from lerobot_craft.bench.settings import BenchSettings
from lerobot_craft.errors import CraftError

_ASK_AGAIN_S = 5.0  # for a cell that another process is running


class CellQueue:
    """The cells of a bench that are neither finished nor given up.

    Args:
        cells: Each after those it needs.
        finished: Digests of finished cells.
        clock: Time in seconds, for retries.
    """

    def __init__(
        self, cells: Sequence[Cell], finished: Iterable[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._finished = set(finished)
        self._waiting = [cell for cell in cells if cell.digest not in self._finished]
        self._not_before: dict[str, float] = {}
        self._at_work: dict[str, Cell] = {}
        self._clock = clock

    @property
    def is_over(self) -> bool:
        """Whether no cell is waiting or running."""
        return not self._waiting and not self._at_work

    @property
    def remaining(self) -> int:
        """Number of cells that wait or run."""
        return len(self._waiting) + len(self._at_work)

    def take(self) -> Cell | None:
        """The first cell that can run now; None if all must wait."""
        for cell in self._waiting:
            ready = all(needed.digest in self._finished for needed in cell.needs)
            if ready and self._clock() >= self._not_before.get(cell.digest, 0.0):
                self._waiting.remove(cell)
                self._at_work[cell.digest] = cell
                return cell
        return None

    def finish(self, cell: Cell) -> None:
        """Mark a cell as finished, so that others can use it."""
        del self._at_work[cell.digest]
        self._finished.add(cell.digest)

    def put_back(self, cell: Cell) -> None:
        """Another process is running the cell: retry later."""
        self._not_before[cell.digest] = self._clock() + _ASK_AGAIN_S
        self._waiting.append(self._at_work.pop(cell.digest))

    def fail(self, cell: Cell) -> list[Cell]:
        """Give up a cell; returns the cells that need it, which are also given up."""
        del self._at_work[cell.digest]
        lost = [other for other in self._waiting if any(needed.digest == cell.digest for needed in other.chain())]
        for other in lost:
            self._waiting.remove(other)
        return lost


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")
_TICK_S = 0.5
_PATIENCE_S = 1.0  # a worker without a cell waits this long before importing ahead
_FINISHED, _BUSY, _FAILED = "finished", "busy", "failed"
_UNKNOWN = (
    "worker processes do not know this cell. They import your script anew, without what stands below "
    '`if __name__ == "__main__"`: put scenarios, policies and methods of your own in above that line, or use --jobs=1'
)


class Watcher(Protocol):
    """Receives progress reports."""

    def kept(self, cell: Cell, result: CellResult) -> None:
        """The cell was finished by an earlier run."""

    def outdated(self, cell: Cell, reason: str) -> None:
        """The cell has a result that is no longer valid."""

    def started(self, cell: Cell) -> None:
        """The cell is running."""

    def finished(self, cell: Cell, result: CellResult) -> None:
        """The cell is finished."""

    def postponed(self, cell: Cell) -> None:
        """Another process is running the cell."""

    def failed(self, cell: Cell, reason: str) -> None:
        """The cell was given up."""

    def tick(self) -> None:
        """Called periodically."""


def run_cells(settings: BenchSettings, train: Train, jobs: int, watcher: Watcher) -> dict[str, CellResult]:
    """Run the missing cells; a failed cell does not stop the others.

    Args:
        settings: The bench's settings.
        train: Runs `craft train`; a module-level function, so that workers can import it.
        jobs: Number of processes; 1: only this one.
        watcher: Receives progress reports.

    Returns:
        Results of all finished cells, by digest.
    """
    cells = plan_cells(settings)
    results = {}
    for cell in cells:
        if (result := result_of(cell)) is not None:
            results[cell.digest] = result
            watcher.kept(cell, result)
        elif (reason := outdated(cell)) is not None:
            watcher.outdated(cell, reason)
    queue = CellQueue(cells, results)
    seats: Sequence[_Here | _Worker] = ()
    with one_thread_each():
        try:
            wanted = min(jobs, queue.remaining)
            seats = [_Here(train)] if jobs == 1 else [_Worker(settings, train) for _ in range(wanted)]
            _serve(queue, seats, watcher, results)
        finally:
            for seat in seats:
                seat.stop()
    return results


def _serve(
    queue: CellQueue, seats: "Sequence[_Here | _Worker]", watcher: Watcher, results: dict[str, CellResult]
) -> None:
    while not queue.is_over:
        for seat in seats:
            if seat.cell is None and (cell := queue.take()) is not None:
                watcher.started(cell)
                seat.begin(cell)
        for seat in _heard(seats):
            cell, (state, answer) = seat.end()
            if state == _BUSY:
                queue.put_back(cell)
                watcher.postponed(cell)
            elif state == _FINISHED:
                queue.finish(cell)
                results[cell.digest] = answer
                watcher.finished(cell, answer)
            else:
                watcher.failed(cell, answer)
                for lost in queue.fail(cell):
                    watcher.failed(lost, f"it needs {cell.kind} {cell.name}")
        watcher.tick()


def _heard(seats: "Sequence[_Here | _Worker]") -> "list[_Here | _Worker]":
    """Wait up to one tick; return the seats whose cell has ended."""
    busy = [seat for seat in seats if seat.cell is not None]
    if not busy:
        time.sleep(_TICK_S)
    handles = [handle for seat in busy for handle in seat.handles]
    heard = wait(handles, timeout=_TICK_S) if handles else []
    return [seat for seat in busy if not seat.handles or any(handle in heard for handle in seat.handles)]


class _Here:
    """Runs cells in this process."""

    handles: Sequence[Any] = ()

    def __init__(self, train: Train) -> None:
        self._train = train
        self.cell: Cell | None = None

    def begin(self, cell: Cell) -> None:
        self.cell = cell

    def end(self) -> tuple[Cell, tuple[str, Any]]:
        cell, self.cell = _require(self.cell), None
        return cell, _attempt(cell, self._train)

    def stop(self) -> None:
        pass


class _Worker:
    """Runs cells in another process, which is replaced if it dies."""

    def __init__(self, settings: BenchSettings, train: Train) -> None:
        self._settings, self._train = settings, train
        self.cell: Cell | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._settings, self._train), daemon=False)
        self._process.start()
        theirs.close()  # otherwise the pipe would stay open after the worker ends

    @property
    def handles(self) -> Sequence[Any]:
        """Handles that become ready when the worker answers or dies."""
        return (self._connection, self._process.sentinel)

    def begin(self, cell: Cell) -> None:
        if not self._process.is_alive():
            self._start()
        self.cell = cell
        self._connection.send(cell.digest)

    def end(self) -> tuple[Cell, tuple[str, Any]]:
        cell, self.cell = _require(self.cell), None
        try:
            answer: tuple[str, Any] = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            answer = (_FAILED, f"its process ended with code {self._process.exitcode}")
            self._start()
        return cell, answer

    def stop(self) -> None:
        """Kill the process; an unfinished cell is run again next time.

        The pipe is closed last: its end makes a worker leave by itself, and a signal in the middle of that leaks.
        """
        self._process.terminate()
        self._process.join()
        self._connection.close()


def _leave(number: int, _: FrameType | None) -> None:
    """Exit normally on SIGTERM, which frees the process's semaphores."""
    sys.exit(128 + number)


def _work(connection: Connection, settings: BenchSettings, train: Train) -> None:
    """A worker's main loop: run cells by digest until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and stops its workers
    signal.signal(signal.SIGTERM, _leave)
    cells = _cells_here(settings)
    with one_thread_each():
        if not connection.poll(_PATIENCE_S):
            _import_ahead(settings)
        while True:
            try:
                digest = connection.recv()
            except EOFError:
                return
            connection.send(_attempt(cells[digest], train) if digest in cells else (_FAILED, _UNKNOWN))


def _import_ahead(settings: BenchSettings) -> None:
    """Import what cells need while others run: this takes ten seconds and more."""
    from lerobot_craft.lerobot_api.pretrained import import_policy

    # The cell that needs a missing package reports it.
    with output_to(Path(os.devnull)), suppress(ImportError, ValueError):
        import lerobot_craft.bench.metaworld.configuration
        import lerobot_craft.bench.reference_drift
        import lerobot_craft.training.run  # noqa: F401

        for policy in settings.policies:
            import_policy(policy)


def _cells_here(settings: BenchSettings) -> dict[str, Cell]:
    """Cells by digest; empty if this process cannot plan them, which the parent has already done."""
    try:
        return {cell.digest: cell for cell in plan_cells(settings)}
    except CraftError:
        return {}


def _attempt(cell: Cell, train: Train) -> tuple[str, Any]:
    try:
        return _FINISHED, ensure(cell, train, wait=False)
    except CellBusyError:
        return _BUSY, None
    except CraftError as error:
        return _FAILED, str(error)
    except Exception as error:  # one cell's fault must not stop the others; its log has the traceback
        first = next(iter(str(error).strip().splitlines()), "")
        return _FAILED, f"{type(error).__name__}: {first}"


def _require(cell: Cell | None) -> Cell:
    if cell is None:
        raise RuntimeError("no cell is at work here")
    return cell


@contextmanager
def one_thread_each() -> Iterator[None]:
    """Limit this process and its children to one thread; restored on exit.

    Small policies gain nothing from more. The count is the same in a worker or here, so that sums are rounded alike.
    """
    import torch

    threads, variables = torch.get_num_threads(), {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
