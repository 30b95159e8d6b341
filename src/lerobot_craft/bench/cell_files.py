"""A cell on disk: its lock, its inputs, its result; a partial result is never taken for a whole one."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from filelock import FileLock, Timeout

from lerobot_craft import __version__
from lerobot_craft.bench.cells import Cell, Run
from lerobot_craft.bench.method_definition import as_argv
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Drift
from lerobot_craft.io.files import plain_errors, read_bytes, write_atomically
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json

CELL_FILE, RESULT_FILE, LOG_FILE = "cell.json", "result.json", "log.txt"
_CRAFT = "craft."
# Settings that other methods ignore: if one of their defaults changes, other methods' results stay valid.
_OF_THE_CONSTRAINT = frozenset(
    (
        *("anchor_batch_size", "retention_freq", "retention_mode", "loss_type", "teacher", "anchor_source"),
        *("num_anchors", "old_frames", "walked_states", "drawn_states", "draw_from", "state_jitter"),
        *("top_k", "num_draws"),
        *("lambda_per_task", "dual_rule", "initial_lambda", "lambda_lr", "lambda_min", "lambda_max"),
        *("lambda_fall_rate", "lambda_gain", "lambda_smoothing"),
        *("epsilon_start", "epsilon_end", "epsilon_decay_steps", "epsilon_decay", "epsilon_unit"),
        *("use_grad_projection", "conflict_threshold", "projection_mode", "task_max_norm", "retention_max_norm"),
    )
)


@dataclass(frozen=True)
class Recorded:
    """A recorded dataset."""

    frames: int
    bytes: int


@dataclass(frozen=True)
class CellResult:
    """Result of a cell; for recordings only `seconds` and `recorded`, for films only `seconds`.

    Attributes:
        seconds: Total time.
        recorded: The dataset, if the cell records one.
        successes: Per task and episode.
        blind: The same with a black picture.
        train_seconds: Total time of `craft train`.
        step_seconds: Median time of a training step, including loading.
        evaluation_seconds: Time of all rollouts.
        drift: From the base, on the old tasks.
        lambda_final: Mean multiplier at the last anchor step.
        eps_final: Budget at that step.
        cached_bytes: Size of the anchor cache.
        command: The command that was run, as typed.
    """

    seconds: float
    recorded: Recorded | None = None
    successes: dict[str, list[bool]] = field(default_factory=dict)
    blind: dict[str, list[bool]] = field(default_factory=dict)
    train_seconds: float | None = None
    step_seconds: float | None = None
    evaluation_seconds: float | None = None
    drift: Drift | None = None
    lambda_final: float | None = None
    eps_final: float | None = None
    cached_bytes: int = 0
    command: str = ""

    @property
    def rates(self) -> dict[str, float]:
        """Success rate of each task."""
        return {task: sum(episodes) / len(episodes) for task, episodes in self.successes.items()}


class CellBusyError(CraftError):
    """Another process, maybe on another machine, is running this cell."""


@contextmanager
def claimed(cell: Cell, *, wait: bool) -> Iterator[None]:
    """Lock a cell for this process; the operating system releases it when the process ends.

    Raises:
        CellBusyError: Another process holds it, and `wait` is false.
    """
    directory = cell.directory
    with plain_errors(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory.with_name(f".{directory.name}.lock"))
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise CellBusyError(f"another process is at {directory}") from None
    try:
        yield
    finally:
        lock.release()


def result_of(cell: Cell) -> CellResult | None:
    """The result of a finished cell; None if it must be run.

    Raises:
        CraftError: A file is damaged.
    """
    if not _has_result(cell) or outdated(cell) is not None:
        return None
    with _said_if_damaged(cell):
        return decode(CellResult, parse_object(read_bytes(cell.directory / RESULT_FILE)))


def outdated(cell: Cell) -> str | None:
    """Why a cell's result is no longer valid; None if it is valid or missing.

    A result is valid for the version that made it. The defaults that `craft train` fills in are compared too: if one
    has changed, the same command would now give another result. Settings that did not exist then are ignored.

    Raises:
        CraftError: A file is damaged.
    """
    if not _has_result(cell):
        return None
    with _said_if_damaged(cell):
        made = parse_object(read_bytes(cell.directory / CELL_FILE))
    if made.get("digest") != cell.digest:
        return "its result is one of other inputs"
    if not cell.outlives_versions and (version := made.get("craft_version")) != __version__:
        return f"its result was made by version {version}, and this is {__version__}"
    if changed := _changed(made.get("settings", {}), settings_of(cell)):
        return f"since its result was made, `craft train` has another default of {', '.join(changed)}"
    return None


def _has_result(cell: Cell) -> bool:
    return all((cell.directory / name).is_file() for name in (CELL_FILE, RESULT_FILE))


@contextmanager
def _said_if_damaged(cell: Cell) -> Iterator[None]:
    try:
        yield
    except StrictJSONError as error:
        raise CraftError(f"{cell.directory} is damaged ({error}): remove it, and it is run again") from error


def begin(cell: Cell) -> None:
    """An empty directory with the cell's inputs. Leftovers are removed; an outdated result is moved aside."""
    directory = cell.directory
    if (directory / RESULT_FILE).exists():
        number = 1
        while (aside := directory.with_name(f"{directory.name}.outdated-{number}")).exists():
            number += 1
        directory.rename(aside)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    content = {
        "kind": cell.kind,
        "name": cell.name,
        "digest": cell.digest,
        "inputs": cell.inputs,
        "needs": {needed.kind: needed.directory.name for needed in cell.needs},
        "settings": settings_of(cell),
        "craft_version": __version__,
    }
    write_atomically(directory / CELL_FILE, to_json(json.loads(json.dumps(content))))


def finish(cell: Cell, result: CellResult) -> None:
    """Write the result, which marks the cell as finished."""
    write_atomically(cell.directory / RESULT_FILE, to_json(result))


def settings_of(cell: Cell) -> dict[str, Any]:
    """Every `--craft.*` setting of a run, with today's defaults of `craft train`; empty for other cells."""
    if not isinstance(cell, Run):
        return {}
    import draccus

    from lerobot_craft.training.config import config_class
    from lerobot_craft.training.methods.registry import METHODS
    from lerobot_craft.training.run_settings import as_json

    flags = cell.inputs["flags"].items()
    argv = as_argv({name.removeprefix(_CRAFT): value for name, value in flags if name.startswith(_CRAFT)})
    settled = as_json(draccus.parse(config_class(argv), args=argv))
    without_effect = () if METHODS[settled["method"]].has_anchors else _OF_THE_CONSTRAINT
    return {name: value for name, value in settled.items() if name not in without_effect}


def _changed(recorded: dict[str, Any], today: dict[str, Any]) -> list[str]:
    return [name for name, value in recorded.items() if name in today and today[name] != value]
