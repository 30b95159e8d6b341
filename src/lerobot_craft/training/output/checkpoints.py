"""Checkpoint directories that are whole or absent, and the link to the newest one."""

import errno
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

from safetensors import SafetensorError

from lerobot_craft.anchors.files import plain_errors, sync_directory, temporary_path
from lerobot_craft.anchors.whole_directory import replaced, settle
from lerobot_craft.errors import CraftError

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
        with replaced(checkpoint_dir) as temporary:
            yield temporary
    except BaseException as error:
        if (number := _disk_error(error)) is not None:
            raise CraftError(_not_saved(checkpoint_dir, number)) from error
        raise


def point_last_at(checkpoint_dir: Path) -> None:
    """Makes `checkpoints/last` a relative link to `checkpoint_dir`: lerobot's own link, but never absent."""
    last = checkpoint_dir.with_name(LAST)
    if last.is_dir() and not last.is_symlink():
        raise CraftError(
            f"{last} is a directory and not a link to the newest checkpoint: a copy of the run followed its links. "
            f"Type `rm -r {last}` and resume again; the checkpoints beside it stay"
        )
    temporary = temporary_path(last)
    with plain_errors(last):
        temporary.unlink(missing_ok=True)  # of a killed run
        temporary.symlink_to(checkpoint_dir.name)
        temporary.replace(last)
        sync_directory(last.parent)


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
            settle(directory / name)
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
    return [
        word if "=" in word else f"{word}={value}"
        for word, value in zip_longest(argv, argv[1:], fillvalue="")
        if word.startswith("--") and word.partition("=")[0].endswith("discover_packages_path")
    ]


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
