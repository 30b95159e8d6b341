"""One finding about this machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How much a finding matters: only `MISSING` keeps craft from working."""

    OK = "ok"
    NOTE = "note"  # worth knowing, nothing to mend
    WARN = "warn"  # works, but slower, noisier or with something left out
    MISSING = "missing"  # needed, and not here


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what to type where it should be otherwise."""

    name: str
    status: Status
    value: str
    remedy: str | None = None


def is_ready(checks: Sequence[Check]) -> bool:
    """Whether everything craft needs is here."""
    return all(check.status is not Status.MISSING for check in checks)
