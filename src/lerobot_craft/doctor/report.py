"""The findings as lines for a person and as JSON for a machine."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TextIO

from lerobot_craft.doctor.check import Check, Status, is_ready

_NAME_WIDTH = 12
_MARK_WIDTH = max(map(len, Status))
_COLOURS = {Status.OK: "32", Status.NOTE: "36", Status.WARN: "33", Status.MISSING: "1;31"}


def wants_colour(env: Mapping[str, str], stream: TextIO) -> bool:
    """Colour only where a person looks, and not where NO_COLOR or a dumb terminal declines it."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def as_lines(check: Check, colour: bool = False) -> str:
    """One aligned line, followed by the remedy on its own line so that it can be copied."""
    mark = f"{check.status:<{_MARK_WIDTH}}"
    if colour:
        mark = f"\033[{_COLOURS[check.status]}m{mark}\033[0m"
    line = f"{mark}  {check.name:<{_NAME_WIDTH}}  {check.value}"
    if check.remedy is None:
        return line
    return f"{line}\n{'':<{_MARK_WIDTH + _NAME_WIDTH + 4}}-> {check.remedy}"


def as_json(checks: Sequence[Check]) -> str:
    """The same findings as one object: `ready`, the verdict's sentence, and the checks in order."""
    findings = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"ready": is_ready(checks), "verdict": verdict(checks), "checks": findings}, indent=2)


def verdict(checks: Sequence[Check]) -> str:
    """One sentence: ready or not, and how much there is to mend."""
    missing = [check.name for check in checks if check.status is Status.MISSING]
    warnings = sum(check.status is Status.WARN for check in checks)
    tail = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    if missing:
        return f"Not ready: {', '.join(missing)} must be mended first{tail}."
    return f"Ready: everything craft needs is here{tail}."
