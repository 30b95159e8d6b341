"""One run per output directory: whoever claims it first has it until its process ends, however it ends."""

import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lerobot_craft.anchors.files import plain_errors, temporary_path, write_atomically
from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.errors import CraftError
from lerobot_craft.training.output.checkpoints import CHECKPOINTS, clear_leftovers, last_checkpoint, resume_command

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
def claim(output_dir: Path, *, resume: bool) -> Iterator[None]:
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
    """Makes room for a fresh run whose directory a run left without a checkpoint, or refuses as `claim` would.

    To be called before lerobot's own validation, which refuses any directory that exists, and says less.
    """
    with plain_errors(output_dir, "--output_dir"):
        exists = output_dir.exists()
    if exists:
        with claim(output_dir, resume=False):
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
    """Takes back what `claim` wrote, and the directory too if nothing else is in it."""
    with suppress(OSError):  # a disk that fails must not hide the error that the run ended with
        for name in _SIGNATURE:
            (output_dir / name).unlink(missing_ok=True)
        if [entry.name for entry in output_dir.iterdir()] == [LOCK]:
            # The lock is the last to go. From here on another run can make its own: then the directory is not empty
            # any more, and stays.
            (output_dir / LOCK).unlink()
            output_dir.rmdir()
