"""Terminal output of the bench and of the demo: redrawn in place on a terminal, otherwise one line per cell."""

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TextIO

from lerobot_craft.bench.cell_files import LOG_FILE, CellResult
from lerobot_craft.bench.cells import Base, Cell, Demos, Film, Rollouts, Run, Trial
from lerobot_craft.evaluation.summary import PLAIN

_REDRAW_S = 1.0
_UP_AND_CLEAR = "\x1b[{lines}F\x1b[J"


class Board:
    """Shows the progress of a bench's cells.

    Args:
        cells: All cells.
        stream: Output.
        live: Whether the stream is a terminal that can be redrawn.
    """

    def __init__(self, cells: Sequence[Cell], stream: TextIO, *, live: bool) -> None:
        self._total = len(cells)
        self._stream, self._live = stream, live
        self._since: dict[str, tuple[Cell, float]] = {}
        self._done: list[tuple[Cell, CellResult]] = []
        self.failures: list[str] = []
        self._kept = 0
        self._lines = 0
        self._drawn = 0.0

    def kept(self, cell: Cell, result: CellResult) -> None:
        """Count the cell, without printing."""
        self._done.append((cell, result))
        self._kept += 1

    def outdated(self, cell: Cell, reason: str) -> None:
        """Say why the cell is run again."""
        self._say(f"{cell.kind} {cell.name} is run again: {reason}")

    def started(self, cell: Cell) -> None:
        """Show the cell as running."""
        self._since[cell.digest] = (cell, time.monotonic())
        if self._live:  # at once, because a cell in this process blocks drawing until it ends
            self._draw([*self._at_work(), *means(self._done)])

    def postponed(self, cell: Cell) -> None:
        """The cell does not run here."""
        self._since.pop(cell.digest, None)

    def finished(self, cell: Cell, result: CellResult) -> None:
        """Print the outcome."""
        self._since.pop(cell.digest, None)
        self._done.append((cell, result))
        self._say(f"[{len(self._done)}/{self._total}] {cell.kind} {cell.name}: {outcome(cell, result)}")

    def failed(self, cell: Cell, reason: str) -> None:
        """Print the reason and the log's path."""
        self._since.pop(cell.digest, None)
        log = cell.directory / LOG_FILE
        seen = f" (log: {log})" if log.exists() else ""
        self.failures.append(f"{cell.kind} {cell.name} was not run to its end: {reason}{seen}")
        self._say(self.failures[-1])

    def tick(self) -> None:
        """Redraw if enough time has passed."""
        if self._live and time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw([*self._at_work(), *means(self._done)])

    def close(self) -> None:
        """Erase the live part."""
        if self._live:
            self._draw([])

    def _say(self, line: str) -> None:
        if self._live:
            self._draw([])
        self._stream.write(f"{line}\n")
        self._stream.flush()

    def _at_work(self) -> list[str]:
        now = time.monotonic()
        kept = f", {self._kept} of them earlier" if self._kept else ""
        failed = f", {len(self.failures)} failed" if self.failures else ""
        head = f"{len(self._done)} of {self._total} cells are done{kept}{failed}"
        return [head, *(f"  {cell.kind} {cell.name}: {now - began:.0f} s" for cell, began in self._since.values())]

    def _draw(self, lines: Sequence[str]) -> None:
        width = shutil.get_terminal_size().columns - 1
        clear = _UP_AND_CLEAR.format(lines=self._lines) if self._lines else ""
        self._stream.write(clear + "".join(f"{line[:width]}\n" for line in lines))
        self._stream.flush()
        self._lines, self._drawn = len(lines), time.monotonic()


def outcome(cell: Cell, result: CellResult) -> str:
    """A cell's outcome in a few words."""
    seconds = f"{result.seconds:.0f} s"
    rates = result.rates
    if isinstance(cell, Trial):
        worst = min(cell.scenario.old, key=lambda task: rates[task])
        old = fmean(rates[task] for task in cell.scenario.old)
        blind = [fmean(result.blind[task]) for task in cell.scenario.old if task in result.blind]
        without = f", blindfolded {fmean(blind):.2f}" if blind else ""
        return f"old {old:.2f}, lowest {rates[worst]:.2f} ({worst}){without}; {seconds}"
    if not isinstance(cell, Run):
        return seconds if result.recorded is None else f"{result.recorded.frames} frames; {seconds}"
    old, same, new = scores(cell, result)
    return f"old {old:.2f}, {'' if same is None else f'same scene {same:.2f}, '}new {new:.2f}; {seconds}"


def scores(cell: Run, result: CellResult) -> tuple[float, float | None, float]:
    """Success on the earlier tasks, on those in the new task's scene (None if none), and on the new task."""
    rates = result.rates
    same = same_scene(cell)
    return (
        fmean(rates[task] for task in cell.known_tasks),
        fmean(rates[task] for task in same) if same else None,
        rates[cell.new_task],
    )


def same_scene(cell: Run) -> list[str]:
    """The old tasks in the new task's scene."""
    return [task for task, new in cell.scenario.pairs if new == cell.new_task and task in cell.scenario.old]


def means(done: Sequence[tuple[Cell, CellResult]]) -> list[str]:
    """One line per method so far."""
    groups: dict[tuple[str, str, int, float | None], list[tuple[float, float | None, float]]] = {}
    for cell, result in done:
        if isinstance(cell, Run) and cell.is_last:
            key = (cell.base.policy.name, cell.method.name, cell.frames, cell.knob)
            groups.setdefault(key, []).append(scores(cell, result))
    if not groups:
        return []
    lines = [f"  {'policy':<10}{'method':<22}{'frames':>7}{'knob':>8}{'runs':>6}{'old':>7}{'same':>7}{'new':>7}"]
    for (policy, method, frames, knob), found in sorted(groups.items(), key=str):
        same = [value for _, value, _ in found if value is not None]
        cells = (fmean(old for old, _, _ in found), fmean(same) if same else None, fmean(new for *_, new in found))
        shown = "".join(f"{'-' if value is None else format(value, '.2f'):>7}" for value in cells)
        at = "-" if knob is None else format(knob, "g")
        lines.append(f"  {policy:<10}{method:<22}{frames:>7}{at:>8}{len(found):>6}{shown}")
    return lines


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
        self._say(f"{self._number(cell)} {result.seconds:4.0f} s  {describe_cell(cell)} (done earlier)")

    def outdated(self, cell: Cell, reason: str) -> None:
        """Say why a finished cell is run again."""
        self._say(f"{self._number(cell)} again, {describe_cell(cell)}: {reason}")

    def started(self, cell: Cell) -> None:
        """Report the start."""
        self._begin(_Stage(self._number(cell), describe_cell(cell), cell))

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
            f"{self._number(cell)} {describe_cell(cell)}: {reason}{f' (log: {log})' if log.exists() else ''}"
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


def describe_cell(cell: Cell) -> str:
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
    if run.method.name == PLAIN:
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
    from lerobot_craft.training.journal import METRICS_FILE, read_metrics

    records = cell.output_dir / METRICS_FILE
    if not records.is_file() or time.time() - records.stat().st_mtime > seconds:
        return ""
    steps = [line["step"] for line in read_metrics(cell.output_dir)]
    return f", step {steps[-1]} of {cell.inputs['flags']['steps']}" if steps else ""
