"""Files of lines, each with a larger step than the one before: JSON objects, or rows of CSV below a header.

What a resumed run must forget is always the end of such a file, and cutting it off never rewrites a line that stays: a
kill in the middle does no harm.
"""

import csv
import io
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.files import plain_errors, require_file, write_atomically
from lerobot_craft.anchors.strict_json import parse_object
from lerobot_craft.errors import CraftError

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


def begin(path: Path, head: bytes) -> None:
    """Make a new file with its header; one that is there is refused."""
    if path.exists(follow_symlinks=False):
        raise CraftError(
            f"{path} is there already: choose another --output_dir, or go on with that run by --resume=true."
        )
    write_atomically(path, head)


def go_on(path: Path, head: bytes, resume_step: int) -> None:
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
    for values, line_end in lines(path, head, parse):
        if values["step"] > resume_step:
            break
        end = line_end
    with plain_errors(path), path.open("r+b") as file:
        file.truncate(end)
        os.fsync(file.fileno())


def lines(path: Path, head: bytes, parse: _Parse) -> Iterator[tuple[dict[str, Any], int]]:
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
    for values, _ in lines(path, head, parse):
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


def cell(name: str, value: object) -> str:
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
