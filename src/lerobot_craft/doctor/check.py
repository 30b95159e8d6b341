"""One finding about this machine and how findings are shown; and checks of what is installed.

Requirements are read from the installed distribution's metadata, not by importing: `import lerobot.policies` takes
many seconds, a wrong version would still import, and the list of requirements stays in one place.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from packaging.requirements import Requirement


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


OLDEST_PYTHON = (3, 12)

# Extra -> what it is for.
EXTRAS = {
    "pi": "pi0, pi05, pi0_fast",
    "smolvla": "smolvla",
    "diffusion": "diffusion",
    "peft": "LoRA",
    "bench": "MetaWorld",
}
DISTRIBUTION = "lerobot-craft"
# Only these are followed into their own requirements; below them the libraries are responsible.
_FOLLOWED = frozenset({"lerobot", DISTRIBUTION})
_IS_CLONE = (Path(__file__).parents[3] / "pyproject.toml").is_file()  # else a wheel was installed


@dataclass(frozen=True)
class Need:
    """One required distribution: which versions fit, and which one is installed (None: none)."""

    name: str
    fitting: str
    installed: str | None
    fits: bool


def installing(line: str) -> str:
    """A command to paste: CRAFT in it becomes the clone if this is one, else the distribution."""
    if _IS_CLONE:
        return f"{line.replace('CRAFT', '.')}  # in a clone of CRaFT"
    return line.replace("CRAFT", DISTRIBUTION)


INSTALL = installing("pip install CRAFT")


def install_extra(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def check_python(surroundings: Surroundings) -> Check:
    """Python and the platform it runs on."""
    value = f"{'.'.join(map(str, surroundings.python))} on {surroundings.system} {surroundings.machine}"
    if surroundings.python[:2] >= OLDEST_PYTHON:
        return Check("python", Status.OK, value)
    oldest = ".".join(map(str, OLDEST_PYTHON))
    remedy = installing(f"uv venv --python {oldest} && uv pip install CRAFT")
    return Check("python", Status.MISSING, f"{value}, older than {oldest}", remedy)


def check_craft(version: str, distribution: str | None) -> Check:
    """Craft itself: which version runs, and whether it is installed (requirements are read from the installed one)."""
    if distribution is None:
        return Check("craft", Status.MISSING, f"{version}, running without being installed", INSTALL)
    if distribution != version:
        value = f"{version}, but {distribution} is what was installed: the two do not belong together"
        return Check("craft", Status.WARN, value, installing("pip install --force-reinstall --no-deps CRAFT"))
    return Check("craft", Status.OK, version)


def check_lerobot(installed: str | None, supported: str | None, env: Mapping[str, str], failure: str | None) -> Check:
    """Lerobot in exactly the release that craft was checked against; `failure`: why it does not import, or None."""
    remedy = f"pip install 'lerobot=={supported}'" if supported else INSTALL
    if installed is None:
        return Check("lerobot", Status.MISSING, "not installed", remedy)
    if failure is not None:
        remedy = remedy.replace("install", "install --force-reinstall --no-deps", 1)
        return Check("lerobot", Status.MISSING, f"{installed} does not import: {failure}", remedy)
    if "LEROBOT_HOME" in env:
        value = f"{installed} refuses to start while the old variable LEROBOT_HOME is set"
        return Check("lerobot", Status.MISSING, value, "export HF_LEROBOT_HOME=$LEROBOT_HOME && unset LEROBOT_HOME")
    if supported is None:
        return Check("lerobot", Status.WARN, f"{installed}; craft is not installed, so nothing says which fits", remedy)
    if installed != supported:
        return Check("lerobot", Status.MISSING, f"{installed}, but craft works with {supported} only", remedy)
    return Check("lerobot", Status.OK, f"{installed}, the supported one")


def check_requirements(needs: Sequence[Need]) -> Check:
    """Everything that craft requires."""
    if not needs:
        return Check("requirements", Status.MISSING, "cannot be read: craft or `packaging` is not installed", INSTALL)
    absent, unfit = _absent(needs), _unfit(needs)
    if absent:
        return Check("requirements", Status.MISSING, f"not installed: {absent}", INSTALL)
    if unfit:
        return Check("requirements", Status.WARN, unfit, INSTALL)
    return Check("requirements", Status.OK, f"all {len(needs)} installed in fitting versions")


def check_extra(extra: str, needs: Sequence[Need]) -> Check:
    """What one extra adds. A missing extra is a note only: nobody needs every policy."""
    purpose, remedy = EXTRAS[extra], install_extra(extra)
    absent, unfit = _absent(needs), _unfit(needs)
    if unfit:
        return Check(extra, Status.WARN, f"for {purpose}: {unfit}", remedy)
    if absent:
        return Check(extra, Status.NOTE, f"for {purpose}: {absent} not installed", remedy)
    found = ", ".join(f"{need.name} {need.installed}" for need in needs)
    return Check(extra, Status.OK, f"for {purpose}: {found}")


def _absent(needs: Sequence[Need]) -> str:
    return ", ".join(need.name for need in needs if need.installed is None)


def _unfit(needs: Sequence[Need]) -> str:
    unfit = [need for need in needs if need.installed is not None and not need.fits]
    return ", ".join(f"{need.name} {need.installed} (needs {need.fitting})" for need in unfit)


def installed_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs(extra: str = "") -> list[Need]:
    """What `lerobot-craft` requires, directly and through lerobot; with an extra, what the extra adds.

    Empty if it cannot be read: craft is not installed, or `packaging` is missing.
    """
    if importlib.util.find_spec("packaging") is None:
        return []
    basic = _by_name(_walk("lerobot-craft", "", set()))
    if not extra:
        return list(basic.values())
    return [need for name, need in _by_name(_walk("lerobot-craft", extra, set())).items() if name not in basic]


def _by_name(found: Iterable[Need]) -> dict[str, Need]:
    """One need per distribution: if several lines ask for it, one that does not fit decides."""
    needed: dict[str, Need] = {}
    for need in found:
        if need.name not in needed or not need.fits:
            needed[need.name] = need
    return needed


@functools.cache
def _requirements(distribution: str) -> "list[Requirement]":
    """The requirement lines of an installed distribution. Cached: lerobot has hundreds."""
    from packaging.requirements import Requirement

    return [Requirement(line) for line in importlib.metadata.requires(distribution) or []]


def _walk(distribution: str, extra: str, seen: set[tuple[str, str]]) -> Iterator[Need]:
    from packaging.utils import canonicalize_name

    if (distribution, extra) in seen or installed_version(distribution) is None:
        return
    seen.add((distribution, extra))
    for requirement in _requirements(distribution):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name != distribution:
            version = installed_version(name)
            fits = version is not None and requirement.specifier.contains(version, prereleases=True)
            yield Need(name, str(requirement.specifier), version, fits)
        if name in _FOLLOWED:
            for wanted in ("", *sorted(requirement.extras)):
                yield from _walk(name, wanted, seen)
