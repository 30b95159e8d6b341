"""What a page is made of, read from paths: results of a bench, evaluations, listenings and trainings."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lerobot_craft.anchors.files import read_bytes
from lerobot_craft.anchors.strict_json import StrictJSONError, parse_object
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.listening import LISTENING_FILE, Listening, read_listening
from lerobot_craft.evaluation.matrix import EVALUATION_FILE, Evaluation, read_evaluation
from lerobot_craft.evaluation.results import Filmstrip, Results, read_results
from lerobot_craft.report.training_runs import TrainingRun, read_training, told_apart
from lerobot_craft.training.records.journal import METRICS_FILE

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
