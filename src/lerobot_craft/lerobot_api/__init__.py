"""Every call into lerobot's internals, and nothing else.

Only this package, `policies/` (one policy's internals per adapter) and `tiny/` (which builds policies) may depend on
lerobot's internals: undocumented names, loggers, messages, private attributes. Everything here was checked against the
one release that craft requires (`supported_version`).

No file here imports lerobot at the top: it takes over ten seconds, and `craft doctor` must run if lerobot is broken.
"""

import copy
import importlib.metadata
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The logger is named after its module, lerobot.utils.import_utils.
_VIDEO_BACKEND_LOGGER = "lerobot.utils.import_utils"
_TORCHCODEC_UNLOADABLE = "'torchcodec' is installed but cannot be loaded"
_TORCHCODEC_NOTICE = (
    "torchcodec cannot be loaded, so videos are decoded by pyav (`craft doctor` says why and how to mend it)"
)


def supported_version() -> str | None:
    """The lerobot release that craft requires, or None if craft is not installed.

    Read from the distribution's own requirements, so there is only one place to change.
    """
    try:
        lines = importlib.metadata.requires("lerobot-craft") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.match(r"lerobot(?:\[[^]]*\])?\s*==\s*([^\s;,]+)", line) for line in lines)
    return next((pin[1] for pin in pins if pin), None)


def quiet_video() -> None:
    """Keep lerobot's video code from flooding the log; call it before opening a dataset.

    Without FFmpeg's libraries, `get_safe_default_video_backend` logs torchcodec's 107-line loading report each time a
    dataset is created or opened: this reduces it to one line per process. The AV1 encoder writes about 20 lines to
    stderr per video: this reduces them to errors, unless SVT_LOG is already set.
    """
    logger = logging.getLogger(_VIDEO_BACKEND_LOGGER)
    if not any(isinstance(known, _TorchcodecOnce) for known in logger.filters):
        logger.addFilter(_TorchcodecOnce())
    os.environ.setdefault("SVT_LOG", "1")  # 1: errors only; the encoder library reads this


@contextmanager
def ordinary_priority() -> Iterator[None]:
    """Record videos within this context.

    The AV1 encoder makes the thread that calls it a real-time one if it runs as root, as in a container, for good: all
    processes that it starts then take the processor from every other process, and wait for each other in vain.
    """
    if not hasattr(os, "sched_getscheduler"):  # not Linux
        yield
        return
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != policy:
            os.sched_setscheduler(0, policy, parameters)


class _TorchcodecOnce(logging.Filter):
    """Logs once, in one line, that torchcodec cannot be loaded; other records pass unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        if _TORCHCODEC_UNLOADABLE not in record.getMessage():
            return True
        if self._said:
            return False
        self._said = True
        short = copy.copy(record)  # copied, because the caller and other filters may hold the record
        short.msg, short.args = _TORCHCODEC_NOTICE, ()
        return short


def policy_in(path: Path) -> Path:
    """The policy of a checkpoint, or of the last one in a training's output directory; other paths unchanged."""
    inside = (path / part for part in ("", "pretrained_model", "checkpoints/last/pretrained_model"))
    return next((directory for directory in inside if (directory / "config.json").is_file()), path)
