"""What a training wrote: its record, its logged steps and its anchor steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.training.records.journal import (
    HISTORY_FILE,
    METRICS_FILE,
    MODULES_FILE,
    read_history,
    read_metrics,
    read_modules,
)
from lerobot_craft.training.records.outcomes import Outcome, outcomes
from lerobot_craft.training.records.run_file import RUN_FILE, RunFile, read_run_file

type Rows = list[dict[str, Any]]

_DRIFT_OF_TASK = "retention_loss/"
_WORDS = ("method", "mode")  # fields of a logged step that are text


@dataclass(frozen=True)
class TrainingRun:
    """One output directory of `craft train`.

    Attributes:
        name: Its name on the page.
        directory: Its directory.
        record: `run.json`; None if its release wrote none.
        metrics: Logged steps.
        history: Anchor steps; empty if they were not kept.
        modules: Cosines by module, of the same steps.
    """

    name: str
    directory: Path
    record: RunFile | None
    metrics: Rows
    history: Rows
    modules: Rows

    @property
    def method(self) -> str:
        """What was added to plain fine-tuning."""
        return str(self.metrics[-1].get("method", "unknown"))

    @property
    def steps(self) -> Rows:
        """Steps that may have drift and multipliers: every anchor step, or the logged ones if there is no history."""
        return self.history or self.metrics

    @property
    def last_step(self) -> int:
        """The last step that was logged."""
        return int(self.metrics[-1]["step"])

    @cached_property
    def tasks(self) -> list[str]:
        """Old tasks that have a drift of their own."""
        keys = dict.fromkeys(key for row in self.steps for key in row)
        return [key.removeprefix(_DRIFT_OF_TASK) for key in keys if key.startswith(_DRIFT_OF_TASK)]

    @property
    def epsilon(self) -> float | None:
        """The last budget that was written; None for lwf, which logs one but does not enforce it."""
        if self.method != "craft":
            return None
        return next((row["epsilon"] for row in reversed(self.steps) if "epsilon" in row), None)

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """All old tasks together, then each one, by the rule of the run's own summary."""
        return list(outcomes(self.metrics, self.tasks, self.history or None))

    def series(self, key: str) -> list[tuple[float, float]]:
        """(step, value) of a measure, at the steps that have it."""
        return [(row["step"], row[key]) for row in self.steps if key in row]


def read_training(directory: Path) -> TrainingRun:
    """Read a training's directory; a file that is damaged is named."""
    metrics = list(map(_checked(directory), read_metrics(directory)))
    if not metrics:
        raise CraftError(
            f"{directory / METRICS_FILE}: there is no logged step in it yet. Wait for the first (--log_freq), or leave "
            "this run out."
        )
    return TrainingRun(
        name=directory.name,
        directory=directory,
        record=read_run_file(directory) if (directory / RUN_FILE).exists() else None,
        metrics=metrics,
        history=list(read_history(directory)) if (directory / HISTORY_FILE).exists() else [],
        modules=list(read_modules(directory)) if (directory / MODULES_FILE).exists() else [],
    )


def _checked(directory: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A logged step, if its values are numbers: JSON allows any value, a drawing does not."""

    def checked(values: dict[str, Any]) -> dict[str, Any]:
        for key, value in values.items():
            if key not in _WORDS and not isinstance(value, int | float):
                path = directory / METRICS_FILE
                raise CraftError(
                    f"{path}, step {values['step']}: {key} is no number ({value!r:.40}). Bring back a copy of the "
                    "file, or leave this run out."
                )
        return values

    return checked


def told_apart(directories: Sequence[Path]) -> list[str]:
    """The last part of each path, or as many parts as needed to tell all apart."""
    parts = [directory.resolve().parts for directory in directories]
    most = max(map(len, parts), default=1)
    for length in range(1, most):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(directory) for directory in directories]
