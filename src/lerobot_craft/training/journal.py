"""What a run writes for others to read: `run.json`, and numbers without a gap or a double after a resume.

Files of lines, each with a larger step than the one before: JSON objects, or rows of CSV below a header.

What a resumed run must forget is always the end of such a file, and cutting it off never rewrites a line that stays: a
kill in the middle does no harm.
"""

import csv
import io
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import plain_errors, read_bytes, require_file, write_atomically
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json

_BOOLEANS = {"true": True, "false": False}

_Parse = Callable[[bytes], dict[str, Any]]


class StepFile:
    """A file that only grows, by whole lines with ever larger steps."""

    def __init__(self, path: Path, last_step: int | None) -> None:
        self._path = path
        self._last_step = last_step
        with plain_errors(path):
            self._file = path.open("ab", buffering=0)

    def append(self, step: int, line: bytes) -> None:
        """Add a line; what does not fit on the disk is taken back."""
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
        """Make every line durable."""
        with plain_errors(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close. Closing again does nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def begin_file(path: Path, head: bytes) -> None:
    """Make a new file with its header; one that is there is refused."""
    if path.exists(follow_symlinks=False):
        raise CraftError(
            f"{path} is there already: choose another --output_dir, or go on with that run by --resume=true."
        )
    write_atomically(path, head)


def resume_file(path: Path, head: bytes, resume_step: int) -> None:
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
        if csv_head(path) != head:
            raise CraftError(
                f"{path}: its columns are not those of this run, so the old tasks are not the same. Resume with the "
                "anchors that the run began with, or move the file away."
            )
        parse = row_parser(head)
    end = len(head)
    for values, line_end in file_lines(path, head, parse):
        if values["step"] > resume_step:
            break
        end = line_end
    with plain_errors(path), path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def file_lines(path: Path, head: bytes, parse: _Parse) -> Iterator[tuple[dict[str, Any], int]]:
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
                step = step_of(values)
                _check_order(step, last_step)
            except ValueError as error:
                raise CraftError(
                    f"{path}, line {number}: it is damaged ({error}). Bring back a copy of the file, or move it away: "
                    "a resumed run then begins a new one."
                ) from error
            last_step = step
            end += len(line)
            yield values, end


def step_of(values: Mapping[str, Any]) -> int:
    """The step of a line; anything but a whole number is a ValueError."""
    step = values.get("step")
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a whole number; it is {step!r:.40}")
    return step


def _check_order(step: int, last_step: int | None) -> None:
    if last_step is not None and step <= last_step:
        raise ValueError(f"step {step} comes after step {last_step}")


def csv_line(cells: Sequence[str]) -> bytes:
    """One record."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\r\n").writerow(cells)  # quotes what holds any of its end: \r too
    return text.getvalue().removesuffix("\r\n").encode() + b"\n"


def csv_head(path: Path) -> bytes:
    """The first record: an instruction in it may go over several lines, and is then in quotes."""
    require_file(path)
    head = b""
    with plain_errors(path), path.open("rb") as file:
        while line := file.readline():
            head += line
            if head.count(b'"') % 2 == 0:
                break
    return head


def read_table(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a CSV file by column, without the empty cells."""
    head = csv_head(path)
    try:
        parse = row_parser(head)
    except ValueError as error:
        raise CraftError(f"{path}: its first line is damaged ({error}). Bring back a copy of the file.") from error
    for values, _ in file_lines(path, head, parse):
        yield values


def row_parser(head: bytes) -> _Parse:
    """What reads a row below this header."""
    columns = next(csv.reader(io.StringIO(head.decode(), newline="")), [])

    def parse(line: bytes) -> dict[str, Any]:
        cells = line.decode().removesuffix("\n").split(",")
        if len(cells) != len(columns):
            raise ValueError(f"it has {len(cells)} cells where the header has {len(columns)}")
        return {name: _value(name, cell) for name, cell in zip(columns, cells, strict=True) if cell}

    return parse


def csv_cell(name: str, value: object) -> str:
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


METRICS_FILE = "metrics.jsonl"
HISTORY_FILE = "lambda_history.csv"
MODULES_FILE = "module_cosines.csv"

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


def history_columns(tasks: Sequence[str]) -> list[str]:
    """Columns of lambda_history.csv: those of the whole step, then for each old task its own."""
    return [*_HISTORY, *(f"{key}/{task}" for task in tasks for key in _HISTORY_PER_TASK)]


def module_columns(modules: Sequence[str]) -> list[str]:
    """Columns of module_cosines.csv."""
    return ["step", *(f"cos/{module}" for module in modules)]


class Journal:
    """metrics.jsonl (one object per logged step), lambda_history.csv and module_cosines.csv (one row per anchor step).

    Steps are counted as lerobot counts them: 1 after the first update. Only the main process may have a journal.

    Args:
        output_dir: Of the run; it is there already.
        history: Whether the files of anchor steps are written.
        tasks: Old tasks with a column of their own: the groups of the multipliers. Empty: one multiplier in all.
        modules: Modules of the policy with a column of their own; without any there is no module_cosines.csv.
        resume_step: The checkpoint's step if the run goes on. What was written after it is cut off.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        history: bool,
        tasks: Sequence[str] = (),
        modules: Sequence[str] = (),
        resume_step: int | None = None,
    ) -> None:
        kept = {METRICS_FILE: b""}
        if history:
            kept[HISTORY_FILE] = csv_line(history_columns(tasks))
            if modules:
                kept[MODULES_FILE] = csv_line(module_columns(modules))
        # Each is looked at before the first is opened: what is refused leaves no file open.
        for name in (METRICS_FILE, HISTORY_FILE, MODULES_FILE):
            _prepare(output_dir / name, kept.get(name), resume_step)
        self._metrics = StepFile(output_dir / METRICS_FILE, resume_step)
        columns = {HISTORY_FILE: history_columns(tasks), MODULES_FILE: module_columns(modules)}
        self._tables = [
            (columns[name], StepFile(output_dir / name, resume_step)) for name in kept if name != METRICS_FILE
        ]

    def log(self, values: Mapping[str, Any]) -> None:
        """Append one object to metrics.jsonl; it must hold `step`, and every number must be finite."""
        step = step_of(values)
        for key, value in values.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{key} is {value} at step {step}: JSON has no such number")
        line = json.dumps(dict(values), ensure_ascii=False, allow_nan=False)
        self._metrics.append(step, f"{line}\n".encode())

    def anchor_step(self, values: Mapping[str, Any]) -> None:
        """Append a row to each file of anchor steps that is kept: of these values, those that have a column."""
        step = step_of(values) if self._tables else 0
        for columns, file in self._tables:
            file.append(step, csv_line([csv_cell(name, values.get(name)) for name in columns]))

    def flush(self) -> None:
        """Make every line durable: before a checkpoint becomes visible, so that it finds all lines up to its step."""
        self._metrics.flush()
        for _, file in self._tables:
            file.flush()

    def close(self) -> None:
        """Flush and close. Closing again does nothing."""
        self._metrics.close()
        for _, file in self._tables:
            file.close()


def _prepare(path: Path, head: bytes | None, resume_step: int | None) -> None:
    """A new file with its header, or a former one without what follows the checkpoint; None: it gets no rows."""
    if head is None:
        if resume_step is not None and path.exists():
            # No rows from here on, but those of steps that are about to be taken again would be untrue.
            resume_file(path, csv_head(path), resume_step)
    elif resume_step is None:
        begin_file(path, head)
    else:
        resume_file(path, head, resume_step)


def read_metrics(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The objects of metrics.jsonl."""
    for values, _ in file_lines(output_dir / METRICS_FILE, b"", parse_object):
        yield values


def read_history(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of lambda_history.csv by column, without the empty cells."""
    return read_table(output_dir / HISTORY_FILE)


def read_modules(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of module_cosines.csv, likewise."""
    return read_table(output_dir / MODULES_FILE)


RUN_FILE = "run.json"
_SCHEMA = 1


@dataclass(frozen=True)
class Held:
    """Memory beyond plain fine-tuning."""

    what: str
    bytes: int


@dataclass(frozen=True)
class AnchorsHeld:
    """The anchors: where their inputs come from (`dataset`, `cross`, `both`), how many, and bytes of their cache."""

    source: str
    number: int
    bytes: int


@dataclass(frozen=True)
class Took:
    """What the steps of the last process of a run took; `records.summary` has the meaning of each number.

    Attributes:
        steps: Steps that were measured.
        anchor_steps: Those of them that visited anchors.
        plain_s: Seconds of all of them without the method's own part.
        extra_s: Seconds of the method's own part.
        start_s: Seconds before the first step.
        process_bytes: Peak of main memory; None where the system does not tell.
        gpu_plain_bytes: Peak of the GPU in steps without anchors; None where there were none.
        gpu_anchors_bytes: In steps with anchors, likewise.
    """

    steps: int
    anchor_steps: int
    plain_s: float
    extra_s: float
    start_s: float
    process_bytes: int | None
    gpu_plain_bytes: int | None
    gpu_anchors_bytes: int | None


@dataclass(frozen=True)
class RunFile:
    """A run.

    Attributes:
        craft_version: The release that ran it.
        created: When it was started, or resumed last.
        command: The line that did.
        method: `--craft.method`.
        mode: What is retained; None for a method without anchors of old tasks.
        policy: lerobot's name of the policy.
        dataset: Of the new task.
        old_datasets: Of the old tasks, where one is named.
        steps: How many are asked for.
        batch_size: New frames of each process in a step; with micro-batches of all of them.
        teacher: Where the policy before fine-tuning was found.
        fingerprint: Of that policy, as `craft eval` knows it.
        tasks: Old instructions.
        budget_unit: What a drift of 1 means, in words; None without a budget.
        conflict_threshold: Cosine below which two gradients are in conflict.
        anchors: None for a method without anchors of old tasks.
        costs: Memory beyond plain fine-tuning.
        end_step: The last step; None while the run goes on, and where it was killed.
        took: None likewise.
        measured_on: What the drift of the actions was measured on, in words; None where it was not measured.
        memory: What travels with the checkpoints, a line for each dataset.
    """

    craft_version: str
    created: str
    command: str
    method: str
    mode: str | None
    policy: str
    dataset: str
    old_datasets: list[str]
    steps: int
    batch_size: int
    teacher: str
    fingerprint: str
    tasks: list[str]
    budget_unit: str | None
    conflict_threshold: float
    anchors: AnchorsHeld | None
    costs: list[Held] = field(default_factory=list)
    end_step: int | None = None
    took: Took | None = None
    measured_on: str | None = None
    memory: list[str] = field(default_factory=list)
    schema: int = _SCHEMA


def write_run_file(output_dir: Path, run: RunFile) -> None:
    """Write `run.json` so that a reader sees the former file or this one, never a part."""
    write_atomically(output_dir / RUN_FILE, to_json(run))


def read_run_file(output_dir: Path) -> RunFile:
    """Read `run.json`; anything unknown, missing, doubled or of another type is refused with the field's name."""
    path = output_dir / RUN_FILE
    try:
        content = parse_object(read_bytes(path))
        if content.get("schema") != _SCHEMA:
            raise StrictJSONError(f"schema: this release reads {_SCHEMA}, the file has {content.get('schema')!r:.40}")
        # Of runs before there were memories.
        return decode(RunFile, {"measured_on": None, "memory": [], **content})
    except StrictJSONError as error:
        raise CraftError(
            f"{path} is no record of this release ({error}): bring back a copy of it, or move it away; the run is "
            "then shown without it."
        ) from error
