"""What a page is made of, read from paths: results of a bench, evaluations, listenings and trainings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.listening import LISTENING_FILE, Listening, read_listening
from lerobot_craft.evaluation.matrix import EVALUATION_FILE, Evaluation, read_evaluation
from lerobot_craft.evaluation.results import Filmstrip, Results, read_results
from lerobot_craft.io.files import read_bytes
from lerobot_craft.io.strict_json import StrictJSONError, parse_object
from lerobot_craft.training.journal import (
    HISTORY_FILE,
    METRICS_FILE,
    MODULES_FILE,
    RUN_FILE,
    RunFile,
    read_history,
    read_metrics,
    read_modules,
    read_run_file,
)
from lerobot_craft.training.outcomes import Outcome, outcomes

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


RESULTS_FILE = "results.json"
_WANTED = (
    f"Give the output directory of `craft train` ({METRICS_FILE} is in it), of `craft bench` or `craft demo` "
    f"({RESULTS_FILE}), of `craft eval` ({EVALUATION_FILE}) or of `craft listen` ({LISTENING_FILE}), or one of these "
    "three JSON files itself."
)

_PNG = b"\x89PNG\r\n\x1a\n"
# A field that only this kind of file has. What is wrong in a file is for its own reader to say.
_TELLING = {RESULTS_FILE: "runs", EVALUATION_FILE: "rows", LISTENING_FILE: "apart_if_kept"}


@dataclass(frozen=True)
class Strip:
    """A caption and the PNG bytes of each stage that was filmed, in order."""

    caption: str
    pictures: dict[str, bytes]


@dataclass(frozen=True)
class Source:
    """Results and the pictures that belong to them."""

    results: Results
    strips: list[Strip]


@dataclass
class Inputs:
    """All that a page is made of, each kind in the order given."""

    sources: list[Source] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    listenings: list[Listening] = field(default_factory=list)
    trainings: list[TrainingRun] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def load_inputs(paths: Sequence[Path]) -> Inputs:
    """Read everything that is found at these paths.

    Raises:
        CraftError: There is nothing to show at one of them, a file is damaged, or something is given twice.
    """
    found = Inputs()
    for path in paths:
        for file in _files_of(path):
            _add(found, file)
    names = told_apart([training.directory for training in found.trainings])
    found.trainings = [replace(run, name=name) for run, name in zip(found.trainings, names, strict=True)]
    return found


def _files_of(path: Path) -> list[Path]:
    if not path.exists():
        raise CraftError(f"{path}: there is no such file or directory. {_WANTED}")
    if path.is_file():
        return [path]
    known = (RESULTS_FILE, EVALUATION_FILE, LISTENING_FILE, METRICS_FILE)
    files = [file for name in known if (file := path / name).is_file()]
    if not files:
        raise CraftError(f"{path}: there is nothing in it to show. {_WANTED}")
    return files


def _add(found: Inputs, file: Path) -> None:
    if file.resolve() in {known.resolve() for known in found.files}:
        raise CraftError(f"{file} is given twice: it would count twice. Name it once.")
    found.files.append(file)
    kind = _kind_of(file)
    if kind == METRICS_FILE:
        found.trainings.append(read_training(file.parent))
    elif kind == LISTENING_FILE:
        found.listenings.append(read_listening(file))
    elif kind == EVALUATION_FILE:
        evaluation = read_evaluation(file)
        if not evaluation.tasks:
            raise CraftError(f"{file}: nothing is played in it yet. Let `craft eval` finish a task, then try again.")
        found.evaluations.append(evaluation)
    else:
        found.sources.append(_load_source(file))


def _load_source(file: Path) -> Source:
    """Read a results file with its pictures."""
    results = read_results(file)
    if not results.runs:
        raise CraftError(f"{file}: there is no finished run in it. Let `craft bench` finish one, then try again.")
    return Source(results, _load_strips(results.media, file.parent))


def _load_strips(media: Sequence[Filmstrip], directory: Path) -> list[Strip]:
    """Read the pictures beside `results.json`; one that is gone is left out.

    Raises:
        CraftError: A name leads out of the directory (the page would carry a file that nobody meant to publish), or the
            file is no PNG.
    """
    strips = []
    for strip in media:
        names = {"before": strip.before, "plain": strip.plain, "craft": strip.craft}
        pictures = {
            stage: picture
            for stage, name in names.items()
            if name is not None and (picture := _read_picture(directory, name)) is not None
        }
        if pictures:
            strips.append(Strip(strip.caption, pictures))
    return strips


def _read_picture(directory: Path, name: str) -> bytes | None:
    path = (directory / name).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise CraftError(f"media: {name} is not below {directory}. Put the picture there and name it relative to it.")
    if not path.is_file():
        return None
    data = path.read_bytes()
    if not data.startswith(_PNG):
        raise CraftError(f"media: {path} is no PNG. Save the picture as PNG, or take it out of the results file.")
    return data


def _kind_of(file: Path) -> str:
    """The default name of such a file. Dated copies have other names and are known by their content."""
    if file.name in _TELLING or file.name == METRICS_FILE:
        return file.name
    try:
        content = parse_object(read_bytes(file))
    except StrictJSONError as error:
        raise CraftError(f"{file} holds no results, evaluation or listening ({error}). {_WANTED}") from error
    for name, field_of_it in _TELLING.items():
        if field_of_it in content:
            return name
    raise CraftError(f"{file} holds no results, evaluation or listening. {_WANTED}")
