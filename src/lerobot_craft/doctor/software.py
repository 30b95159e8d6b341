"""Checks of what is installed: Python, craft, lerobot, their requirements and the optional ones."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lerobot_craft.doctor.check import Check, Status
from lerobot_craft.doctor.requirements import Need
from lerobot_craft.doctor.surroundings import Surroundings

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
_IS_CLONE = (Path(__file__).parents[3] / "pyproject.toml").is_file()  # else a wheel was installed


def installing(line: str) -> str:
    """A line with CRAFT in it, which is the clone if this is one, else the distribution. It can be pasted whole."""
    if _IS_CLONE:
        return f"{line.replace('CRAFT', '.')}  # in a clone of CRaFT"
    return line.replace("CRAFT", DISTRIBUTION)


INSTALL = installing("pip install CRAFT")


def install_extra(extra: str) -> str:
    """The line that brings what an extra needs."""
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
    """Craft itself: the code that runs, and whether it was installed (its requirements are read from there)."""
    if distribution is None:
        return Check("craft", Status.MISSING, f"{version}, running without being installed", INSTALL)
    if distribution != version:
        value = f"{version}, but {distribution} is what was installed: the two do not belong together"
        return Check("craft", Status.WARN, value, installing("pip install --force-reinstall --no-deps CRAFT"))
    return Check("craft", Status.OK, version)


def check_lerobot(installed: str | None, supported: str | None, env: Mapping[str, str], failure: str | None) -> Check:
    """Lerobot in exactly the release that craft was checked against; `failure` is why it does not import, if so."""
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
    """Everything that comes with craft."""
    if not needs:
        return Check("requirements", Status.MISSING, "cannot be read: craft or `packaging` is not installed", INSTALL)
    absent, unfit = _absent(needs), _unfit(needs)
    if absent:
        return Check("requirements", Status.MISSING, f"not installed: {absent}", INSTALL)
    if unfit:
        return Check("requirements", Status.WARN, unfit, INSTALL)
    return Check("requirements", Status.OK, f"all {len(needs)} installed in fitting versions")


def check_extra(extra: str, needs: Sequence[Need]) -> Check:
    """What one extra adds. Absent is a note: nobody needs every policy."""
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
