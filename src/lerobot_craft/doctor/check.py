"""One finding about this machine, what the checks look at, and how findings are shown."""

import dataclasses
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TextIO

_TOOLS = ("apt-get", "nvidia-smi")
_NAME_WIDTH = 12


class Status(StrEnum):
    """How much a finding matters: only `MISSING` keeps craft from working."""

    OK = "ok"
    NOTE = "note"  # worth knowing, nothing to fix
    WARN = "warn"  # works, but slower, noisier or with something left out
    MISSING = "missing"  # needed, and not here


_MARK_WIDTH = max(map(len, Status))
_COLOURS = {Status.OK: "32", Status.NOTE: "36", Status.WARN: "33", Status.MISSING: "1;31"}


@dataclass(frozen=True)
class Check:
    """What was checked, what was found, and the command that fixes it."""

    name: str
    status: Status
    value: str
    remedy: str | None = None


@dataclass(frozen=True)
class Surroundings:
    """The machine as the checks see it: one value, so that a test can change it.

    Attributes:
        env: the environment variables.
        system: `Linux`, `Darwin` or `Windows`.
        machine: the processor's architecture.
        python: the interpreter's version.
        is_root: whether system packages can be installed without sudo.
        tools: which of the programs that the checks ask about are on the PATH.
        here: the current directory, the default place of outputs.
        home: the user's home, the default place of every cache.
    """

    env: Mapping[str, str]
    system: str
    machine: str
    python: tuple[int, int, int]
    is_root: bool
    tools: frozenset[str]
    here: Path
    home: Path

    @classmethod
    def observe(cls) -> "Surroundings":
        """The surroundings of this process."""
        return cls(
            env=dict(os.environ),
            system=platform.system(),
            machine=platform.machine(),
            python=sys.version_info[:3],
            is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
            tools=frozenset(tool for tool in _TOOLS if shutil.which(tool)),
            here=Path.cwd(),
            home=Path.home(),
        )

    def install_line(self, apt: str, elsewhere: str) -> str:
        """The command that installs system packages here, or a sentence if the package manager is unknown."""
        if "apt-get" in self.tools:
            apt_get = "apt-get" if self.is_root else "sudo apt-get"
            return f"{apt_get} update && {apt_get} install -y {apt}"  # containers come without package lists
        if self.system == "Darwin":
            return f"brew install {elsewhere}"
        return f"install {elsewhere} with this system's package manager"

    def shorten(self, path: Path) -> str:
        """The path with the home directory as `~`: a pasted report should not show the user's name."""
        return str("~" / path.relative_to(self.home)) if path.is_relative_to(self.home) else str(path)


def is_ready(checks: Sequence[Check]) -> bool:
    """Whether everything craft needs is here."""
    return all(check.status is not Status.MISSING for check in checks)


def verdict(checks: Sequence[Check]) -> str:
    """One sentence: ready or not, and how many warnings."""
    missing = [check.name for check in checks if check.status is Status.MISSING]
    warnings = sum(check.status is Status.WARN for check in checks)
    tail = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    if missing:
        return f"Not ready: {', '.join(missing)} must be fixed first{tail}."
    return f"Ready: everything craft needs is here{tail}."


def wants_colour(env: Mapping[str, str], stream: TextIO) -> bool:
    """Colour only on a terminal, and only if neither NO_COLOR nor a dumb terminal declines it."""
    return stream.isatty() and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def as_lines(check: Check, colour: bool = False) -> str:
    """One aligned line; the remedy follows on a line of its own so that it can be copied."""
    mark = f"{check.status:<{_MARK_WIDTH}}"
    if colour:
        mark = f"\033[{_COLOURS[check.status]}m{mark}\033[0m"
    line = f"{mark}  {check.name:<{_NAME_WIDTH}}  {check.value}"
    if check.remedy is None:
        return line
    return f"{line}\n{'':<{_MARK_WIDTH + _NAME_WIDTH + 4}}-> {check.remedy}"


def as_json(checks: Sequence[Check]) -> str:
    """The same findings as one object: `ready`, the sentence of `verdict`, and the checks in order."""
    findings = [dataclasses.asdict(check) for check in checks]
    return json.dumps({"ready": is_ready(checks), "verdict": verdict(checks), "checks": findings}, indent=2)
