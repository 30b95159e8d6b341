"""The output directory: one run at a time, checkpoints whole or not at all, and CRaFT's own state in them.

Whoever claims an output directory first has it until its process ends, however it ends. A resume refuses a checkpoint
if the files beside CRaFT's state are no longer those that were saved.
"""

import errno
import hashlib
import logging
import os
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import read_flags
from lerobot_craft.io.files import (
    HASHING_THREADS,
    discard_directory,
    plain_errors,
    read_bytes,
    replaced_directory,
    settle_directory,
    sha256_of,
    sync_directory,
    temporary_path,
    write_atomically,
)
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json
from lerobot_craft.training.card_sections import CARD_FILE, teacher_of

# lerobot's own names; its tools look for them.
CHECKPOINTS = "checkpoints"
LAST = "last"
TRAIN_CONFIG = Path("pretrained_model") / "train_config.json"
TRAINING_STEP = Path("training_state") / "training_step.json"

_STEP = re.compile(r"\d+")
_LEFTOVER = re.compile(r"\.(\d+)\.(tmp|old)")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors quotes the system's errno
# What a person can mend. Any other OSError (a library's network errors are some) is a fault and keeps its traceback.
_REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space in your quota",
    errno.EFBIG: "raise `ulimit -f` or choose a filesystem that takes large files",
    errno.EROFS: "make the filesystem writable again",
    errno.EACCES: "see `ls -ld` of that directory",
    errno.EPERM: "see `ls -ld` of that directory",
    errno.EIO: "look at `dmesg`: the disk may be failing",
}


@contextmanager
def whole_or_not_at_all(checkpoint_dir: Path) -> Iterator[Path]:
    """A temporary directory to write a checkpoint into, which becomes `checkpoint_dir` once the block has succeeded.

    Everything is on the disk before the name changes, so a kill or a power failure leaves the former checkpoint of that
    name (or none) or the new one, and at most leftovers that `clear_leftovers` knows. On an error the temporary
    directory is removed.

    Raises:
        CraftError: The disk is full, or failed in another way that a person can mend.
    """
    try:
        with replaced_directory(checkpoint_dir) as temporary:
            yield temporary
    except BaseException as error:
        if (number := _disk_error(error)) is not None:
            raise CraftError(_not_saved(checkpoint_dir, number)) from error
        raise


def point_last_at(checkpoint_dir: Path) -> None:
    """Makes `checkpoints/last` a relative link to `checkpoint_dir`: lerobot's own link, but never absent."""
    last = checkpoint_dir.with_name(LAST)
    refuse_copied_link(last.parent)
    temporary = temporary_path(last)
    with plain_errors(last):
        temporary.unlink(missing_ok=True)  # of a killed run
        temporary.symlink_to(checkpoint_dir.name)
        temporary.replace(last)
        sync_directory(last.parent)


def refuse_copied_link(checkpoints: Path) -> None:
    """Refuse a directory in the place of `last`: it would stay what it is while the run saves newer checkpoints."""
    last = checkpoints / LAST
    if last.is_dir() and not last.is_symlink():
        raise CraftError(
            f"{last} is a directory and not a link to the newest checkpoint: a copy of the run followed its links. "
            f"Type `rm -r {last}` and resume again; the checkpoints beside it stay"
        )


def point_last_at_resumed(output_dir: Path, checkpoint_dir: Path) -> None:
    """Makes `last` the checkpoint that a run goes on from: a kill may have come between its name and the link.

    A run that was killed right after its final checkpoint takes no further step, and would never set the link again.
    """
    resumed = checkpoint_dir.resolve()
    if resumed.parent == (output_dir / CHECKPOINTS).resolve() and _STEP.fullmatch(resumed.name):
        point_last_at(output_dir / CHECKPOINTS / resumed.name)


def last_checkpoint(output_dir: Path) -> Path | None:
    """The checkpoint with the highest step that training can go on from, or None."""
    return max(whole_checkpoints(output_dir / CHECKPOINTS), key=lambda path: int(path.name), default=None)


def whole_checkpoints(directory: Path) -> list[Path]:
    """Those in a directory `checkpoints` that training can go on from, in no order."""
    if not directory.is_dir():
        return []
    with plain_errors(directory):
        return [path for path in directory.iterdir() if _STEP.fullmatch(path.name) and _is_whole(path)]


def clear_leftovers(output_dir: Path) -> list[Path]:
    """Removes what a killed save left, puts back a checkpoint that was being replaced, and returns what it found.

    Only for whoever holds the run's lock: a save that is going on looks the same.
    """
    directory = output_dir / CHECKPOINTS
    if not directory.is_dir():
        return []
    with plain_errors(directory):
        found = sorted(path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))
        for name in sorted({path.name[1:].rpartition(".")[0] for path in found}):
            settle_directory(directory / name)
        link = temporary_path(directory / LAST)
        if link.is_symlink():
            link.unlink()
            found.append(link)
    return found


def resume_command(checkpoint_dir: Path) -> str:
    """The line that goes on from a checkpoint, ready for a shell."""
    checkpoint = [f"--config_path={checkpoint_dir / TRAIN_CONFIG}", "--resume=true"]
    return shlex.join(["craft", "train", *checkpoint, *package_flags(sys.argv)])


def package_flags(argv: Sequence[str]) -> list[str]:
    """The flags that name packages to import, as `--x=y`: lerobot forgets them, and a resumed run needs them."""
    return [f"--{name}={value}" for name, value in read_flags(argv) if name.endswith("discover_packages_path")]


def _is_whole(checkpoint_dir: Path) -> bool:
    # A name without a dot is given to whole ones only; this leaves out what a killed lerobot-train, or a person, left.
    return all((checkpoint_dir / part).is_file() for part in (TRAIN_CONFIG, TRAINING_STEP))


def _disk_error(error: BaseException) -> int | None:
    """The errno of what a person can mend, whoever raised it; None for any other error."""
    if isinstance(error, CraftError) and error.__cause__ is not None:
        error = error.__cause__
    number: int | None = None
    if isinstance(error, OSError):
        number = error.errno
    elif isinstance(error, SafetensorError) and (match := _OS_ERROR.search(str(error))):
        number = int(match[1])
    return number if number in _REMEDIES else None


def _not_saved(checkpoint_dir: Path, number: int) -> str:
    existing = next(parent for parent in checkpoint_dir.parents if parent.exists())
    free = shutil.disk_usage(existing).free / 1e9
    # The run is two levels up, or three: a merged policy is in OUTPUT_DIR/merged/alpha_0.20/pretrained_model.
    last = next(filter(None, map(last_checkpoint, checkpoint_dir.parents[1:3])), None)
    if last is None:
        again = "run the same command, or give another --output_dir"
        way_on = f"There is no earlier one. To start again, {_REMEDIES[number]} and {again}."
    else:
        way_on = f"The last whole one is {last}. To go on from it, {_REMEDIES[number]} and run\n{resume_command(last)}"
    return f"{checkpoint_dir} could not be saved ({os.strerror(number)}; {free:.2f} GB are free there). {way_on}"


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
            discard_directory(path)


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


logger = logging.getLogger(__name__)

LOCK = ".craft.lock"
# Beside the lock, because some releases of filelock empty the lock's own file whenever somebody asks for it.
HOLDER = ".craft.pid"
_SIGNATURE = (HOLDER, temporary_path(Path(HOLDER)).name)
# What a run writes before its first checkpoint: records, a probe and its anchors, the memory of its checkpoints and the
# one that it began with, videos of evaluations, what wandb keeps. Only files of these names are removed when it is
# started again.
_RECORDS = r"metrics\.jsonl|lambda_history\.csv|module_cosines\.csv|run\.json|action_probe\.safetensors"
_CACHE_FILES = r"(manifest|build)\.(json|sha256)|shard-\d+\.(safetensors|sha256)"
_MEMORIES = rf"\.?{MEMORY_FOLDER}(_before)?(\.tmp|\.old)?"
_OWN_FILES = re.compile(
    rf"({_RECORDS})|\.({_RECORDS})\.tmp"
    rf"|\.probe_anchors\.lock|(probe_anchors|{_MEMORIES})/(({_CACHE_FILES})|\.({_CACHE_FILES})\.tmp)"
    r"|eval/videos_step_\d+/.*|wandb/(debug[^/]*\.log|latest-run|((offline-)?run-[^/]+/.*))"
)
_OWN_DIRECTORIES = re.compile(rf"|{CHECKPOINTS}|probe_anchors|{_MEMORIES}|eval|wandb")
_MAIN_RANK_CLEARS_S = 60.0  # how long other ranks wait for the main one to make way


@contextmanager
def claim_run_dir(output_dir: Path, *, resume: bool) -> Iterator[None]:
    """Holds `output_dir` for this process, and creates it if need be; for the main process of a run only.

    The system itself lets go of the lock when the process ends, also by SIGKILL. A run that ends without having written
    anything leaves no directory, so that the same command can be run again: lerobot refuses one that exists.

    Args:
        output_dir: Where the run writes.
        resume: Whether the directory may hold a run already.

    Raises:
        CraftError: Another process holds it, a fresh run would write into something that is there, or the directory
            cannot be written.
    """
    lock = FileLock(output_dir / LOCK, timeout=0)
    with plain_errors(output_dir, "--output_dir"):
        if output_dir.exists() and not output_dir.is_dir():
            raise CraftError(f"{output_dir} is a file: give another --output_dir")
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
        except FileNotFoundError as error:  # such as in /proc
            message = f"--output_dir={output_dir}: no directory can be made there. Give one on a disk."
            raise CraftError(message) from error
        try:
            if not resume and not (output_dir / LOCK).exists():
                _require_unused(output_dir)  # before the lock: nothing is put into a directory that is somebody's
            lock.acquire()
        except (Timeout, FileNotFoundError):  # not found: a run that wrote nothing is just removing the directory
            raise CraftError(_held(output_dir, resume)) from None
    try:
        if not resume:
            _clear_unsaved(output_dir)
            _require_unused(output_dir)
        write_atomically(output_dir / HOLDER, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        _leave(output_dir)
        lock.release()


def make_way(output_dir: Path) -> None:
    """Makes room for a fresh run whose directory a run left without a checkpoint, or refuses as `claim_run_dir` would.

    To be called before lerobot's own validation, which refuses any directory that exists, and says less.
    """
    with plain_errors(output_dir, "--output_dir"):
        exists = output_dir.exists()
    if exists:
        with claim_run_dir(output_dir, resume=False):
            pass  # leaving it removes it


def wait_for_way(output_dir: Path) -> None:
    """For the other ranks: until the main one has made way, or has refused to and their launcher ends them."""
    until = time.monotonic() + _MAIN_RANK_CLEARS_S
    while output_dir.exists() and (output_dir / LOCK).exists() and time.monotonic() < until:
        time.sleep(0.05)


def _clear_unsaved(output_dir: Path) -> None:
    """Removes what a run wrote that ended before its first checkpoint; nothing, if anything else is there too.

    Its lock says that there was one, and we hold it: no run is going on.
    """
    with plain_errors(output_dir):
        clear_leftovers(output_dir)
        if last_checkpoint(output_dir) is not None or _not_the_runs(output_dir) is not None:
            return
        entries = [entry for entry in output_dir.iterdir() if entry.name not in (LOCK, *_SIGNATURE)]
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    if entries:
        logger.warning("%s: an earlier run saved no checkpoint; its records were removed, it starts over", output_dir)


def _not_the_runs(output_dir: Path) -> Path | None:
    """Something in the directory that no run writes before its first checkpoint."""
    for folder, directories, files in output_dir.walk():
        for name in files + [name for name in directories if (folder / name).is_symlink()]:
            path = (folder / name).relative_to(output_dir)
            if path.as_posix() not in (LOCK, *_SIGNATURE) and not _OWN_FILES.fullmatch(path.as_posix()):
                return path
        first = "".join(folder.relative_to(output_dir).parts[:1])  # empty: the output directory itself
        if not directories and not files and not _OWN_DIRECTORIES.fullmatch(first):
            return folder.relative_to(output_dir)
    return None


def _require_unused(output_dir: Path) -> None:
    if all(entry.name in (LOCK, *_SIGNATURE) for entry in output_dir.iterdir()):
        return
    last = last_checkpoint(output_dir)
    if last is None:
        found = _not_the_runs(output_dir)
        files = "" if found is None else f" ({found} is there, which no run writes before its first checkpoint)"
        raise CraftError(
            f"{output_dir} is not empty and holds no checkpoint to resume from{files}: give another --output_dir, or "
            "move those files away and run the same command again"
        )
    raise CraftError(
        f"{output_dir} holds a run: give another --output_dir, or go on with that one:\n{resume_command(last)}"
    )


def _held(output_dir: Path, resume: bool) -> str:
    try:
        holder = f"process {(output_dir / HOLDER).read_text().strip()}"
    except OSError:  # it has the lock but did not sign yet, or it is leaving
        holder = "another process"
    way_on = "wait for it or end it, then resume" if resume else "give another --output_dir"
    return f"{output_dir} is in use by {holder}: {way_on}"


def _leave(output_dir: Path) -> None:
    """Takes back what `claim_run_dir` wrote, and the directory too if nothing else is in it."""
    with suppress(OSError):  # a disk that fails must not hide the error that the run ended with
        for name in _SIGNATURE:
            (output_dir / name).unlink(missing_ok=True)
        if [entry.name for entry in output_dir.iterdir()] == [LOCK]:
            # The lock is the last to go. From here on another run can make its own: then the directory is not empty
            # any more, and stays.
            (output_dir / LOCK).unlink()
            output_dir.rmdir()
