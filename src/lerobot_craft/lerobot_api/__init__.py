"""Every call into lerobot's internals, and nothing else.

Only this room, `policies/` (adapters know one policy's inside each) and `tiny/` (which builds policies) may know how
lerobot works inside: names it does not document, loggers, messages, private attributes. Everything here was checked
against the one release that craft requires (`supported_version`); when lerobot changes, this is what changes.

Nothing of lerobot is imported at the top of a file here: that takes ten seconds and more, and `craft doctor` reads this
module on machines where lerobot is broken.
"""

import copy
import importlib.metadata
import logging
import os
import re
from pathlib import Path

# lerobot.utils.import_utils logs under its own module name.
_VIDEO_BACKEND_LOGGER = "lerobot.utils.import_utils"
_TORCHCODEC_UNLOADABLE = "'torchcodec' is installed but cannot be loaded"
_TORCHCODEC_NOTICE = (
    "torchcodec cannot be loaded, so videos are decoded by pyav (`craft doctor` says why and how to mend it)"
)


def supported_version() -> str | None:
    """The lerobot release that craft requires, or None where craft runs without being installed.

    It stands in the distribution's own requirements and nowhere else, so the two cannot disagree.
    """
    try:
        lines = importlib.metadata.requires("lerobot-craft") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    pins = (re.match(r"lerobot(?:\[[^]]*\])?\s*==\s*([^\s;,]+)", line) for line in lines)
    return next((pin[1] for pin in pins if pin), None)


def quiet_video() -> None:
    """Keep lerobot's video code from flooding the log; call it before a dataset is opened.

    Without FFmpeg's libraries `get_safe_default_video_backend` logs torchcodec's whole loading report, 107 lines,
    each time a dataset is created or opened: that becomes one line per process. The AV1 encoder writes some 20
    lines to stderr for each video: that becomes its errors only, unless SVT_LOG is already set.
    """
    logger = logging.getLogger(_VIDEO_BACKEND_LOGGER)
    if not any(isinstance(known, _TorchcodecOnce) for known in logger.filters):
        logger.addFilter(_TorchcodecOnce())
    os.environ.setdefault("SVT_LOG", "1")  # 1: errors; read by the encoder library itself


class _TorchcodecOnce(logging.Filter):
    """Says once, in one line, that torchcodec cannot be loaded; every other record passes as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool | logging.LogRecord:
        if _TORCHCODEC_UNLOADABLE not in record.getMessage():
            return True
        if self._said:
            return False
        self._said = True
        short = copy.copy(record)  # the record is the caller's; other filters may hold it
        short.msg, short.args = _TORCHCODEC_NOTICE, ()
        return short


def policy_in(path: Path) -> Path:
    """The policy of a checkpoint, or of the last one of a training's output directory; any other path as it is."""
    inside = (path / part for part in ("", "pretrained_model", "checkpoints/last/pretrained_model"))
    return next((directory for directory in inside if (directory / "config.json").is_file()), path)
