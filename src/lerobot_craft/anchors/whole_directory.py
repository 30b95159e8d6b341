"""Directories that are whole or absent: a kill at any moment leaves the old one or the new one."""

import ctypes
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lerobot_craft.anchors.files import sync_directory, temporary_path


@contextmanager
def replaced(directory: Path) -> Iterator[Path]:
    """A temporary directory to write into, which becomes `directory` once the block has succeeded.

    Everything is on the disk before the name changes, so a kill or a power failure leaves the former directory of that
    name (or none) or the new one, and at most leftovers that `settle` knows. On an error the temporary directory is
    removed.
    """
    temporary = temporary_path(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        settle(directory)
        temporary.mkdir()
        yield temporary
        _sync_tree(temporary)
        _put_in_place(temporary, directory)
    except BaseException:
        with suppress(OSError):  # the error that came first is the one to report
            settle(directory)
        raise


def _put_in_place(temporary: Path, directory: Path) -> None:
    if directory.exists() and _exchange(temporary, directory):
        sync_directory(directory.parent)  # before the old one goes: its name must not come back without content
    else:
        if directory.exists():
            directory.rename(_aside(directory))
        temporary.rename(directory)
        sync_directory(directory.parent)
    settle(directory)


def settle(directory: Path) -> None:
    """Leaves of a replacement, wherever it stopped, the directory under its name and nothing else."""
    temporary, aside = temporary_path(directory), _aside(directory)
    if aside.exists() and not directory.exists():
        aside.rename(directory)
    _remove(temporary)
    if aside.exists():
        # Renamed first: a half removed directory must never be taken for one that waits to be put back.
        aside.rename(temporary)
        _remove(temporary)


def discard(directory: Path) -> None:
    """Removes a directory that is not needed any more; half of it is never seen under its name."""
    temporary = temporary_path(directory)
    _remove(temporary)
    directory.rename(temporary)
    _remove(temporary)


def _aside(directory: Path) -> Path:
    """Where a directory waits while its successor takes its name."""
    return directory.with_name(f".{directory.name}.old")


def _remove(directory: Path) -> None:
    if directory.is_symlink():
        directory.unlink()
    else:
        # What cannot be removed now (another machine may have it open) must not fail a save; it goes with the next.
        shutil.rmtree(directory, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step, and says whether it could: Linux can, on most local filesystems."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    done: int = renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange)
    return done == 0


def _sync_tree(directory: Path) -> None:
    """Puts the files and names of a directory onto the disk."""
    for folder, _, files in directory.walk(top_down=False):
        for name in files:
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(folder)
