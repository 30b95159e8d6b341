"""One run per output directory: whoever claims it first has it until its process ends, however it ends."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from lerobot_craft.anchors.files import plain_errors, temporary_path, write_atomically
from lerobot_craft.errors import CraftError
from lerobot_craft.training.output.checkpoints import last_checkpoint, resume_command

LOCK = ".craft.lock"
# Beside the lock, because some releases of filelock empty the lock's own file whenever somebody asks for it.
HOLDER = ".craft.pid"
_SIGNATURE = (HOLDER, temporary_path(Path(HOLDER)).name)


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
    with plain_errors(output_dir):
        if output_dir.exists() and not output_dir.is_dir():
            raise CraftError(f"{output_dir} is a file: give another --output_dir")
        output_dir.mkdir(parents=True, exist_ok=True)
        try:
            if not resume and not (output_dir / LOCK).exists():
                _require_unused(output_dir)  # before the lock: nothing is put into a directory that is somebody's
            lock.acquire()
        except (Timeout, FileNotFoundError):  # not found: a run that wrote nothing is just removing the directory
            raise CraftError(_held(output_dir, resume)) from None
    try:
        if not resume:
            _require_unused(output_dir)
        write_atomically(output_dir / HOLDER, f"{os.getpid()} on {socket.gethostname()}\n".encode())
        yield
    finally:
        _leave(output_dir)
        lock.release()


def make_way(output_dir: Path) -> None:
    """Makes room for a fresh run whose directory a killed run left without content, or refuses as `claim` would.

    To be called before lerobot's own validation, which refuses any directory that exists, and says less.
    """
    with plain_errors(output_dir):
        exists = output_dir.exists()
    if exists:
        with claim(output_dir, resume=False):
            pass  # leaving it removes it


def _require_unused(output_dir: Path) -> None:
    if all(entry.name in (LOCK, *_SIGNATURE) for entry in output_dir.iterdir()):
        return
    last = last_checkpoint(output_dir)
    if last is None:
        raise CraftError(f"{output_dir} is not empty and holds no checkpoint to resume from: give another --output_dir")
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
