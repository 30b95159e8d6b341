"""The numbers of a run on disk, without a gap or a double after a resume."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.strict_json import parse_object
from lerobot_craft.training.records.step_file import (
    StepFile,
    begin,
    cell,
    csv_head,
    csv_line,
    go_on,
    lines,
    read_table,
    step_of,
)

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
            file.append(step, csv_line([cell(name, values.get(name)) for name in columns]))

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
            go_on(path, csv_head(path), resume_step)
    elif resume_step is None:
        begin(path, head)
    else:
        go_on(path, head, resume_step)


def read_metrics(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The objects of metrics.jsonl."""
    for values, _ in lines(output_dir / METRICS_FILE, b"", parse_object):
        yield values


def read_history(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of lambda_history.csv by column, without the empty cells."""
    return read_table(output_dir / HISTORY_FILE)


def read_modules(output_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of module_cosines.csv, likewise."""
    return read_table(output_dir / MODULES_FILE)
