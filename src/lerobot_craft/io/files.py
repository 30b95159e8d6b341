"""Files and directories that are complete or absent, and checksums in `sha256sum -c` format.

A directory is replaced as a whole: after a kill at any moment the old one or the new one is there.
"""

import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lerobot_craft.errors import CraftError

Progress = Callable[[int], object]
"""Told how many more bytes were read: `tqdm.update` fits."""

HASHING_THREADS = min(8, os.cpu_count() or 1)
"""SHA-256 takes 1 to 2 GB/s of a core; eight are as fast as most disks."""

_CHUNK = 1 << 20
_CHECKSUM_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)\n")
_REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space, then run the same command again",
    errno.EDQUOT: "your disk quota is used up: free some space, then run the same command again",
    errno.EFBIG: "the file is larger than the filesystem or `ulimit -f` allows: choose another place or raise it",
    errno.EROFS: "the filesystem is read-only: choose a directory that can be written, then run the command again",
    errno.EACCES: "permission denied: see `ls -ld` of it and its directory, or choose another one",
    errno.EPERM: "the operation is not permitted there: see `ls -ld` of it and its directory, or choose another one",
    errno.ENOENT: "there is no such file",
    errno.ENOTDIR: "a part of that path is a file, not a directory",
    errno.EISDIR: "it is a directory where a file should be",
    errno.ELOOP: "its symbolic links lead in a circle or where none is allowed: remove them",
    errno.EIO: "the disk failed to read or write it: look at `dmesg`, then copy the data from elsewhere",
}


@contextmanager
def plain_errors(path: Path, flag: str = "") -> Iterator[None]:
    """Turn the operating system's errors about `path`, the value of a flag, into a message with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, error.strerror or str(error))
        raise CraftError(f"{f'{flag}={path}' if flag else path}: {remedy}.") from error


def require_file(path: Path) -> int:
    """Size of a regular file in bytes. Anything else (missing, directory, pipe, link loop) is refused."""
    with plain_errors(path):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CraftError(f"{path}: it is not a regular file. Remove it, or point the command to another directory.")
    return status.st_size


def read_bytes(path: Path) -> bytes:
    """The whole content of a regular file."""
    require_file(path)  # opening a named pipe would block forever
    with plain_errors(path):
        return path.read_bytes()


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """SHA-256 of a file in hexadecimal. Reads in chunks; other threads can run meanwhile."""
    require_file(path)
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_CHUNK))
    with plain_errors(path), path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if progress is not None:
                progress(count)
    return digest.hexdigest()


def temporary_path(path: Path) -> Path:
    """Where a file is written before it is renamed."""
    return path.with_name(f".{path.name}.tmp")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, even if the power fails.

    The temporary name is always `.NAME.tmp`, so the next write overwrites what a killed run left.
    """
    temporary = temporary_path(path)
    with plain_errors(path):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            if temporary.is_file():
                temporary.unlink()  # frees the space on a full disk
            raise
        sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, not only the files' contents."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network filesystems do not support this call; their rename is the best available.
        if error.errno not in {errno.EINVAL, errno.ENOTSUP}:
            raise
    finally:
        os.close(descriptor)


def checksum_path(path: Path) -> Path:
    """Checksum file of `path`: `shard-00000.safetensors` -> `shard-00000.sha256`."""
    return path.with_suffix(".sha256")


def write_checksum(path: Path, sha256: str | None = None) -> str:
    """Write the checksum file of `path` in `sha256sum` format; computes the digest if not given."""
    sha256 = sha256 or sha256_of(path)
    write_atomically(checksum_path(path), f"{sha256}  {path.name}\n".encode())
    return sha256


def read_checksum(path: Path) -> str:
    """The SHA-256 of `path` according to its checksum file."""
    source = checksum_path(path)
    match = _CHECKSUM_LINE.fullmatch(read_bytes(source).decode(errors="replace"))
    if match is None or match[2] != path.name:
        raise CraftError(f"{source}: expected one line `SHA-256  {path.name}`. It is damaged: rebuild the cache.")
    return match[1]


@contextmanager
def replaced_directory(directory: Path) -> Iterator[Path]:
    """A temporary directory to write into. It replaces `directory` if the block succeeds.

    Everything is synced to disk before the rename. So a kill or a power failure leaves the previous directory (or none)
    or the new one, plus leftovers that `settle_directory` removes. On an error the temporary directory is removed.
    """
    temporary = temporary_path(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        settle_directory(directory)
        temporary.mkdir()
        yield temporary
        _sync_tree(temporary)
        _put_in_place(temporary, directory)
    except BaseException:
        with suppress(OSError):  # report the first error
            settle_directory(directory)
        raise


def _put_in_place(temporary: Path, directory: Path) -> None:
    if directory.exists() and _exchange(temporary, directory):
        sync_directory(directory.parent)  # before the old one is removed: its name must not return without content
    else:
        if directory.exists():
            directory.rename(_aside(directory))
        temporary.rename(directory)
        sync_directory(directory.parent)
    settle_directory(directory)


def settle_directory(directory: Path) -> None:
    """Finish or undo an interrupted replacement: only the directory remains."""
    temporary, aside = temporary_path(directory), _aside(directory)
    if aside.exists() and not directory.exists():
        aside.rename(directory)
    _remove(temporary)
    if aside.exists():
        # Renamed first: a half-removed directory must never be mistaken for one to restore.
        aside.rename(temporary)
        _remove(temporary)


def discard_directory(directory: Path) -> None:
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
