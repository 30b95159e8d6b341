"""CRaFT's own state in a checkpoint, and whether the files beside it are still those that were saved."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.files import HASHING_THREADS, plain_errors, read_bytes, sha256_of, write_atomically
from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.anchors.strict_json import StrictJSONError, decode, parse_object, to_json
from lerobot_craft.anchors.whole_directory import discard
from lerobot_craft.errors import CraftError
from lerobot_craft.training.output.card_sections import CARD_FILE, teacher_of
from lerobot_craft.training.output.checkpoints import TRAIN_CONFIG, resume_command, whole_checkpoints

CRAFT_STATE = Path("training_state") / "craft_state.json"
CRAFT_CONFIG_FILE = "craft_config.json"
PASSING = "passing"  # in the state of a checkpoint that the next one replaces
_SCHEMA = 2
_WEIGHTS = ".safetensors"


@dataclass(frozen=True)
class _StateFile:
    """Content of `craft_state.json`.

    Attributes:
        schema: Of this file.
        sha256: Of the canonical JSON of all that follows.
        state: What CRaFT itself goes on from.
        files: SHA-256 of what a run resumes from, by paths within the checkpoint: weights, states and settings.
    """

    schema: int
    sha256: str
    state: dict[str, Any]
    files: dict[str, str]


def save_craft_state(checkpoint_dir: Path, state: dict[str, Any]) -> None:
    """Writes what CRaFT needs to go on (JSON values; every number survives exactly) into a checkpoint.

    As its last file: the files that are there by then are those that `check_files` will ask for. The card is not among
    them, `craft eval` fills it in; nor the memory: `craft remember` changes it, and it has checksums of its own.
    """
    path = checkpoint_dir / CRAFT_STATE
    pretrained = checkpoint_dir / TRAIN_CONFIG.parent
    apart = (path, pretrained / CARD_FILE, pretrained / MEMORY_FOLDER)
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        found = sorted(file for file in checkpoint_dir.rglob("*") if file.is_file())
    found = [file for file in found if file not in apart and file.parent not in apart]
    files = dict(zip((file.relative_to(checkpoint_dir).as_posix() for file in found), _sha256_of(found), strict=True))
    write_atomically(path, to_json(_StateFile(_SCHEMA, _digest(state, files), state, files)))


def check_settings(checkpoint_dir: Path) -> None:
    """As `check_files`, without the weights and moments, which take longer: before anything reads the settings.

    An edited file would be resumed as another run. lerobot's own parsers say less, and what they do not know they skip.
    """
    files = _read_state(checkpoint_dir).files
    _compare(checkpoint_dir, {name: sha256 for name, sha256 in files.items() if not name.endswith(_WEIGHTS)})


def check_files(checkpoint_dir: Path) -> None:
    """Refuse a checkpoint of which a file is missing or is not the one that was saved.

    lerobot's pi0 family goes on with random weights when its file is damaged, and says so in passing only.
    """
    _compare(checkpoint_dir, _read_state(checkpoint_dir).files)


def _compare(checkpoint_dir: Path, files: Mapping[str, str]) -> None:
    saved = {checkpoint_dir / name: sha256 for name, sha256 in files.items()}
    for file in saved:
        if not file.is_file():
            raise CraftError(f"{file} is missing: {_another(checkpoint_dir)}")
    for file, found in zip(saved, _sha256_of(list(saved)), strict=True):
        if found == saved[file]:
            continue
        if file.parent.name == TRAIN_CONFIG.parent.name and file.suffix != _WEIGHTS:
            said = "it is damaged or was edited. A resumed run takes changes as flags"
        else:
            said = "it is damaged"
        raise CraftError(f"{file} is not what was saved, {said}: {_another(checkpoint_dir)}")


def _sha256_of(files: Sequence[Path]) -> Iterator[str]:
    """Of each; the weights and the optimizer's moments are large, so several at a time."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        yield from pool.map(sha256_of, files)


def _another(checkpoint_dir: Path) -> str:
    """What to do instead of going on from a damaged checkpoint."""
    directory = checkpoint_dir.resolve()
    others = [path for path in whole_checkpoints(directory.parent) if path != directory]
    if not others:
        return "copy the checkpoint again, or start the run anew"
    newest = max(others, key=lambda path: int(path.name))
    return f"copy the checkpoint again, or go on from another one with\n{resume_command(newest)}"


def require_settings(directory: Path) -> None:
    """Refuse a `pretrained_model` that a run with CRaFT saved and that has lost its settings: it would train without.

    Args:
        directory: `pretrained_model` of a checkpoint, without `craft_config.json`.
    """
    checkpoint_dir = directory.parent
    marks = [path for path in (checkpoint_dir / CRAFT_STATE, directory / CARD_FILE) if path.is_file()]
    if marks and (marks[0].name != CARD_FILE or teacher_of(marks[0]) is not None):
        raise CraftError(
            f"{directory / CRAFT_CONFIG_FILE} is missing, and {marks[0].name} says that this checkpoint was trained "
            f"with CRaFT. Without its settings it would train on as plain fine-tuning: {_another(checkpoint_dir)}"
        )


def load_craft_state(checkpoint_dir: Path) -> dict[str, Any]:
    """What `save_craft_state` was given; a checkpoint without it, or with a damaged one, is refused."""
    return _read_state(checkpoint_dir).state


def remove_passing(checkpoint_dir: Path) -> None:
    """Remove earlier checkpoints of the run that were only to last until this one, which is whole."""
    for path in whole_checkpoints(checkpoint_dir.parent):
        if int(path.name) < int(checkpoint_dir.name) and _is_passing(path):
            discard(path)


def _is_passing(checkpoint_dir: Path) -> bool:
    try:
        return load_craft_state(checkpoint_dir).get(PASSING) is True
    except CraftError:  # damaged, or not saved with CRaFT: a person may want to look at it
        return False


def _read_state(checkpoint_dir: Path) -> _StateFile:
    path = checkpoint_dir / CRAFT_STATE
    if not path.exists() and (settings := checkpoint_dir / TRAIN_CONFIG.parent / CRAFT_CONFIG_FILE).is_file():
        raise CraftError(f"{path} is missing, and {settings.name} says that CRaFT saved it: {_another(checkpoint_dir)}")
    if not path.exists():
        raise CraftError(
            f"{checkpoint_dir} was not saved by `craft train` with CRaFT enabled, so CRaFT cannot be resumed from it: "
            f"fine-tune from it in a new run, with --policy.path={checkpoint_dir / TRAIN_CONFIG.parent}"
        )
    try:
        content = parse_object(read_bytes(path))
        schema = content.get("schema")
        if type(schema) is int and schema != _SCHEMA:
            raise CraftError(
                f"{path} has schema {schema}, and this version of craft reads {_SCHEMA}: resume with the version that "
                "saved it"
            )
        file = decode(_StateFile, content)
        if file.sha256 != _digest(file.state, file.files):
            raise StrictJSONError("sha256: not that of its content")
    except StrictJSONError as error:
        raise CraftError(f"{path} is damaged ({error}): resume from another checkpoint of this run") from error
    return file


def _digest(state: dict[str, Any], files: dict[str, str]) -> str:
    return hashlib.sha256(to_json({"state": state, "files": files})).hexdigest()
