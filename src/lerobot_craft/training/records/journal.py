"""The numbers of a run on disk: `metrics.jsonl` and `lambda_history.csv`, without a gap or a double after a resume.

Both are files of lines, and each line has a larger step than the one before. So what a resumed run must forget is
always the end of a file, and cutting it off never rewrites a line that stays: a kill in the middle does no harm.
"""

import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.files import plain_errors, require_file, write_atomically
from lerobot_craft.anchors.strict_json import parse_object
from lerobot_craft.errors import CraftError

METRICS_FILE = "metrics.jsonl"
HISTORY_FILE = "lambda_history.csv"

_HISTORY = (
    "step",
    "epsilon",
    "retention_loss",
    "lambda",
    "conflict",
    "dot",
    "cos",
    "task_norm",
    "retention_norm",
    "merged_norm",
    "action_drift",
)
_HISTORY_PER_TASK = ("lambda", "retention_loss", "action_drift")
_BOOLEANS = {"true": True, "false": False}

_Parse = Callable[[bytes], dict[str, Any]]


def history_columns(tasks: Sequence[str]) -> list[str]:
    """Columns of lambda_history.csv: those of the whole step, then for each old task its own."""
    return [*_HISTORY, *(f"{key}/{task}" for task in tasks for key in _HISTORY_PER_TASK)]


class Journal:
    """metrics.jsonl (one object per logged step) and lambda_history.csv (one row per anchor step) of a run.

    Steps are counted as lerobot counts them: 1 after the first update. Only the main process may have a journal.

    Args:
        output_dir: Of the run; it is there already.
        history: Whether lambda_history.csv is written.
        tasks: Old tasks with a column of their own: the groups of the multipliers. Empty: one multiplier in all.
        resume_step: The checkpoint's step if the run goes on. What was written after it is cut off.
    """

    def __init__(
        self, output_dir: Path, *, history: bool, tasks: Sequence[str] = (), resume_step: int | None = None
    ) -> None:
        self._columns = history_columns(tasks)
        metrics_path, history_path = output_dir / METRICS_FILE, output_dir / HISTORY_FILE
        if resume_step is None:
            _begin(metrics_path, b"")
            if history:
                _begin(history_path, _csv_line(self._columns))
        else:
            _go_on(metrics_path, b"", resume_step)
            if history:
                _go_on(history_path, _csv_line(self._columns), resume_step)
            elif history_path.exists():
                # No rows from here on, but those of steps that are about to be taken again would be untrue.
                _go_on(history_path, _csv_head(history_path), resume_step)
        self._metrics = _StepFile(metrics_path, resume_step)
        self._history = _StepFile(history_path, resume_step) if history else None

    def log(self, values: Mapping[str, Any]) -> None:
        """Append one object to metrics.jsonl; it must hold `step`, and every number must be finite."""
        step = _step_of(values)
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} is {value} at step {step}: JSON has no such number")
        line = json.dumps(dict(values), ensure_ascii=False, allow_nan=False)
        self._metrics.append(step, f"{line}\n".encode())

    def anchor_step(self, values: Mapping[str, Any]) -> None:
        """Append one row to lambda_history.csv, if it is kept: of these values, those that have a column."""
        if self._history is None:
            return
        step = _step_of(values)
        self._history.append(step, _csv_line([_cell(name, values.get(name)) for name in self._columns]))

    def flush(self) -> None:
        """Make every line durable: before a checkpoint becomes visible, so that it finds all lines up to its step."""
        self._metrics.flush()
        if self._history is not None:
            self._history.flush()

    def close(self) -> None:
        """Flush and close. Closing again does nothing."""
        self._metrics.close()
        if self._history is not None:
            self._history.close()


def read_metrics(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The objects of metrics.jsonl."""
    for values, _ in _lines(output_dir / METRICS_FILE, b"", parse_object):
        yield values


def read_history(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of lambda_history.csv by column, without the empty cells."""
    path = output_dir / HISTORY_FILE
    head = _csv_head(path)
    for values, _ in _lines(path, head, _row_parser(head)):
        yield values


class _StepFile:
    """A file that only grows, by whole lines with ever larger steps."""

    def __init__(self, path: Path, last_step: int | None) -> None:
        self._path = path
        self._last_step = last_step
        with plain_errors(path):
            self._file = path.open("ab", buffering=0)

    def append(self, step: int, line: bytes) -> None:
        _check_order(step, self._last_step)
        with plain_errors(self._path):
            size = self._file.tell()
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._file.fileno(), rest) :]
            except OSError:
                self._file.truncate(size)  # a full disk takes half a line; the next one must not follow it
                raise
        self._last_step = step

    def flush(self) -> None:
        with plain_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def _begin(path: Path, head: bytes) -> None:
    if path.exists(follow_symlinks=False):
        raise CraftError(
            f"{path} is there already: choose another --output_dir, or go on with that run by --resume=true."
        )
    write_atomically(path, head)


def _go_on(path: Path, head: bytes, resume_step: int) -> None:
    """Cut off what was written after `resume_step`, and a line that a kill left unfinished."""
    if path.is_symlink():
        raise CraftError(
            f"{path} is a link, and going on would cut the file that it leads to: put the file itself there, or move "
            "the link away."
        )
    if not path.exists(follow_symlinks=False):
        logging.warning("%s is missing: it begins anew after step %d", path, resume_step)
        write_atomically(path, head)
        return
    parse: _Parse = parse_object
    if head:
        if _csv_head(path) != head:
            raise CraftError(
                f"{path}: its columns are not those of this run, so the old tasks are not the same. Resume with the "
                "anchors that the run began with, or move the file away."
            )
        parse = _row_parser(head)
    end = len(head)
    for values, line_end in _lines(path, head, parse):
        if values["step"] > resume_step:
            break
        end = line_end
    with plain_errors(path), path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def _lines(path: Path, head: bytes, parse: _Parse) -> Iterator[tuple[dict[str, Any], int]]:
    """What each line after `head` says, and the byte where it ends. A last line without its end is left out."""
    require_file(path)
    last_step: int | None = None
    end = len(head)
    with plain_errors(path), path.open("rb") as file:
        file.seek(end)
        for number, line in enumerate(file, start=1 + head.count(b"\n")):
            if not line.endswith(b"\n"):
                return
            try:
                values = parse(line)
                step = _step_of(values)
                _check_order(step, last_step)
            except ValueError as error:
                raise CraftError(
                    f"{path}, line {number}: it is damaged ({error}). Bring back a copy of the file, or move it away: "
                    "a resumed run then begins a new one."
                ) from error
            last_step = step
            end += len(line)
            yield values, end


def _step_of(values: Mapping[str, Any]) -> int:
    step = values.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a whole number; it is {step!r:.40}")
    return step


def _check_order(step: int, last_step: int | None) -> None:
    if last_step is not None and step <= last_step:
        raise ValueError(f"step {step} comes after step {last_step}")


def _csv_line(cells: Sequence[str]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # quotes what holds any of its end: \r too
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def _csv_head(path: Path) -> bytes:
    """The first record: an instruction in it may go over several lines, and is then in quotes."""
    require_file(path)
    head = b""
    with plain_errors(path), path.open("rb") as file:
        while line := file.readline():
            head += line
            if head.count(b'"') % 2 == 0:
                break
    return head


def _row_parser(head: bytes) -> _Parse:
    columns = next(csv.reader(io.StringIO(head.decode(), newline="")), [])

    def parse(line: bytes) -> dict[str, Any]:
        cells = line.decode().removesuffix("\n").split(",")
        if len(cells) != len(columns):
            raise ValueError(f"it has {len(cells)} cells where the header has {len(columns)}")
        return {name: _value(name, cell) for name, cell in zip(columns, cells, strict=True) if cell}

    return parse


def _cell(name: str, value: object) -> str:
    """A number as the shortest text that reads back as the same number; nothing as nothing."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        return repr(float(value))
    raise ValueError(f"{name}: {value!r:.40} is no finite number")


def _value(name: str, cell: str) -> bool | int | float:
    if cell in _BOOLEANS:
        return _BOOLEANS[cell]
    if name == "step":
        return int(cell)
    value = float(cell)
    if not math.isfinite(value):
        raise ValueError(f"{name} is {cell}")
    return value
