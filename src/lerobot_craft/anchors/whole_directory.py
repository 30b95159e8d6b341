"""Directories that are complete or absent: after a kill at any moment the old one or the new one is there."""

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
    """A temporary directory to write into. It replaces `directory` if the block succeeds.

    Everything is synced to disk before the rename. So a kill or a power failure leaves the previous directory (or none)
    or the new one, plus leftovers that `settle` removes. On an error the temporary directory is removed.
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
        with suppress(OSError):  # report the first error
            settle(directory)
        raise


def _put_in_place(temporary: Path, directory: Path) -> None:
    if directory.exists() and _exchange(temporary, directory):
        sync_directory(directory.parent)  # before the old one is removed: its name must not return without content
    else:
        if directory.exists():
            directory.rename(_aside(directory))
        temporary.rename(directory)
        sync_directory(directory.parent)
    settle(directory)


def settle(directory: Path) -> None:
    """Finish or undo an interrupted replacement: only the directory remains."""
    temporary, aside = temporary_path(directory), _aside(directory)
    if aside.exists() and not directory.exists():
        aside.rename(directory)
    _remove(temporary)
    if aside.exists():
        # Renamed first: a half-removed directory must never be mistaken for one to restore.
        aside.rename(temporary)
        _remove(temporary)


def discard(directory: Path) -> None:
    """Remove a directory; it is never visible half-removed under its name."""
    temporary = temporary_path(directory)
    _remove(temporary)
    directory.rename(temporary)
    _remove(temporary)


def _aside(directory: Path) -> Path:
    """Where the old directory waits while the new one takes its name."""
    return directory.with_name(f".{directory.name}.old")


def _remove(directory: Path) -> None:
    if directory.is_symlink():
        directory.unlink()
    else:
        # A failure to remove (another machine may have it open) must not fail a save; the next save removes it.
        shutil.rmtree(directory, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names atomically and return whether that worked. Linux supports it on most local filesystems."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    at_fdcwd, rename_exchange = -100, 2
    done: int = renameat2(at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange)
    return done == 0


def _sync_tree(directory: Path) -> None:
    """Sync a directory's files and names to disk."""
    for folder, _, files in directory.walk(top_down=False):
        for name in files:
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_directory(folder)
