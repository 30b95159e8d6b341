"""Numbers, bytes and durations as people read them."""

import math


def number(value: float) -> str:
    """Three decimals, unless they would hide what is not zero or run on for millions."""
    value = float(value) + 0.0  # no minus before a zero
    text = f"{value:.3f}"
    hidden = value != 0 and float(text) == 0
    return f"{value:.1e}" if hidden or 1e6 <= abs(value) < math.inf else text


def human_bytes(size: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def count(n: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is 1."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def decimal_bytes(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    if not count:
        return "0"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, with about two digits."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
