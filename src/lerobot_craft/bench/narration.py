"""The demo's terminal output: current stage, progress, time taken."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TextIO

from lerobot_craft.bench.cells import Base, Cell, Demos, Film, Rollouts, Run, Trial
from lerobot_craft.bench.store import LOG_FILE, CellResult

_REDRAW_S = 1.0
_UP_AND_CLEAR = "\x1b[{lines}F\x1b[J"


@dataclass(frozen=True)
class _Stage:
    """A running stage."""

    number: str
    what: str
    cell: Cell
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since it started."""
        return time.monotonic() - self.began

    def line(self, further: str = "") -> str:
        """Its line; time and step come first, because a narrow terminal cuts off the end."""
        return f"{self.number} {self.seconds:4.0f} s{further}  {self.what}"


class Narrator:
    """Reports the stages of the demo.

    Args:
        cells: All cells, in order.
        stream: Output.
        live: Whether the stream is a terminal that can be redrawn.
    """

    def __init__(self, cells: Sequence[Cell], stream: TextIO, *, live: bool) -> None:
        self._numbers = {cell.digest: number for number, cell in enumerate(cells, start=1)}
        self._total = len(cells)
        self._stream, self._live = stream, live
        self._at_work: dict[str, _Stage] = {}  # by number
        self._lines = 0
        self._drawn = 0.0
        self.failures: list[str] = []

    def kept(self, cell: Cell, result: CellResult) -> None:
        """Report a cell finished by an earlier run."""
        self._say(f"{self._number(cell)} {result.seconds:4.0f} s  {describe(cell)} (done earlier)")

    def outdated(self, cell: Cell, reason: str) -> None:
        """Say why a finished cell is run again."""
        self._say(f"{self._number(cell)} again, {describe(cell)}: {reason}")

    def started(self, cell: Cell) -> None:
        """Report the start."""
        self._begin(_Stage(self._number(cell), describe(cell), cell))

    def finished(self, cell: Cell, result: CellResult) -> None:
        """Report the time taken."""
        self._end(self._number(cell))

    def postponed(self, cell: Cell) -> None:
        """Another process is running the cell."""
        self._at_work.pop(self._number(cell), None)

    def failed(self, cell: Cell, reason: str) -> None:
        """Report the reason and the log's path."""
        self._at_work.pop(self._number(cell), None)
        log = cell.directory / LOG_FILE
        self.failures.append(
            f"{self._number(cell)} {describe(cell)}: {reason}{f' (log: {log})' if log.exists() else ''}"
        )
        self._say(self.failures[-1])

    def tick(self) -> None:
        """Redraw if enough time has passed."""
        if self._live and time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw(self._running())

    def close(self) -> None:
        """Erase the live part."""
        if self._live:
            self._draw([])

    def _number(self, cell: Cell) -> str:
        return f"[{self._numbers[cell.digest]}/{self._total}]"

    def _begin(self, stage: "_Stage") -> None:
        self._at_work[stage.number] = stage
        if self._live:
            self._draw(self._running())
        else:
            self._say(f"{stage.number} {stage.what}")

    def _end(self, number: str) -> None:
        stage = self._at_work.pop(number)
        # Without redrawing, the description was printed earlier, possibly with other lines in between.
        self._say(stage.line() if self._live else f"{number} done in {stage.seconds:.0f} s")

    def _say(self, line: str) -> None:
        if self._live:
            self._draw([])
        self._stream.write(f"{line}\n")
        if self._live:
            self._draw(self._running())
        self._stream.flush()

    def _running(self) -> list[str]:
        width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be erased
        return [stage.line(how_far(stage.cell, stage.seconds))[:width] for stage in self._at_work.values()]

    def _draw(self, lines: Sequence[str]) -> None:
        clear = _UP_AND_CLEAR.format(lines=self._lines) if self._lines else ""
        self._stream.write(clear + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._lines, self._drawn = len(lines), time.monotonic()


def describe(cell: Cell) -> str:
    """What a cell does, for readers who do not know the bench."""
    if isinstance(cell, Demos):
        of = f"each of {len(cell.recorded)} old tasks" if cell.is_old else "the new one"
        return f"record demonstrations: {cell.episodes} of {of}"
    if isinstance(cell, Base):
        return f"train a small {cell.policy.name} on the old tasks"
    if isinstance(cell, Trial):
        return "roll it out before fine-tuning"
    if isinstance(cell, Rollouts):
        return f"let it play {cell.episodes} episodes of each old task"
    if isinstance(cell, Run):
        return f"fine-tune it on the new task{_how(cell)}, roll it out"
    if isinstance(cell, Film):
        return f"film a rollout {_when(cell.filmed)}"
    raise NotImplementedError(type(cell))


def _when(filmed: Base | Run) -> str:
    return "before fine-tuning" if isinstance(filmed, Base) else f"after fine-tuning{_how(filmed)}"


def _how(run: Run) -> str:
    if run.method.name == "naive":
        return " plainly"
    frames = f", {run.frames} old frames" if run.frames else ", no old frame"
    return f" with {run.method.label}{frames}"


def how_far(cell: Cell, seconds: float) -> str:
    """The current step of a training, from its own records; empty before the first record.

    Args:
        cell: The running cell.
        seconds: Its running time; older records belong to an interrupted training.
    """
    if not isinstance(cell, Base | Run):
        return ""
    from lerobot_craft.training.records.journal import METRICS_FILE, read_metrics

    records = cell.output_dir / METRICS_FILE
    if not records.is_file() or time.time() - records.stat().st_mtime > seconds:
        return ""
    steps = [line["step"] for line in read_metrics(cell.output_dir)]
    return f", step {steps[-1]} of {cell.inputs['flags']['steps']}" if steps else ""
