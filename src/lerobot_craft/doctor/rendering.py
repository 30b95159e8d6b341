"""Check of off-screen rendering, which the simulators need: every back-end that counts is really tried."""

from collections.abc import Callable, Mapping

from lerobot_craft.doctor.check import Check, Status
from lerobot_craft.doctor.probe import Probe
from lerobot_craft.doctor.software import install_extra, installing
from lerobot_craft.doctor.surroundings import Surroundings

_TIMEOUT_S = 30.0
_SWITCHED_OFF = ("disable", "disabled", "off", "false", "0")  # MuJoCo's own list
# Tried on a bare Debian 12: libegl1 with libgl1-mesa-dri is not enough, PyOpenGL needs libGL itself.
_APT = "libegl1 libgl1"

TryBackend = Callable[[str], str | None]


def try_backend(backend: str, env: Mapping[str, str]) -> str | None:
    """Render with one MUJOCO_GL back-end ("" leaves the choice to MuJoCo): None if it works, else why not."""
    # MuJoCo reads an empty MUJOCO_GL like an absent one.
    with Probe("render.py", env={**env, "MUJOCO_GL": backend}, timeout_s=_TIMEOUT_S) as probe:
        report = probe.report()
    finding = report.topic("render")
    if "error" in finding:
        return str(finding["error"])
    return None if finding["contrast"] else "every pixel came out alike"


def check_rendering(mujoco: str | None, surroundings: Surroundings, attempt: TryBackend) -> Check:
    """Which back-end renders, and what to type so that MuJoCo takes it."""
    if mujoco is None:
        return Check("rendering", Status.NOTE, "mujoco is not installed", install_extra("bench"))
    chosen = surroundings.env.get("MUJOCO_GL", "").strip().lower()
    if chosen in _SWITCHED_OFF:
        return Check("rendering", Status.NOTE, f"switched off by MUJOCO_GL={chosen}")
    headless = surroundings.system == "Linux" and not surroundings.env.get("DISPLAY")
    if chosen or not headless:
        failure = attempt(chosen)
        named = f"MUJOCO_GL={chosen}" if chosen else "MuJoCo's default back-end"
        if failure is None:
            return Check("rendering", Status.OK, f"mujoco {mujoco} renders with {named}")
        complaint = f"{named} does not work ({failure})"
    else:
        complaint = "MUJOCO_GL is not set and MuJoCo's default needs a display"
    return _recommend(surroundings, attempt, complaint, tried=chosen)


def _recommend(surroundings: Surroundings, attempt: TryBackend, complaint: str, tried: str) -> Check:
    if surroundings.system != "Linux":  # elsewhere MuJoCo has only one back-end, and it failed
        remedy = "unset MUJOCO_GL" if tried else installing("pip install --force-reinstall mujoco 'CRAFT[bench]'")
        return Check("rendering", Status.WARN, complaint, remedy)
    for backend in ("egl", "osmesa"):
        if backend != tried and attempt(backend) is None:
            return Check("rendering", Status.WARN, f"{backend} works, but {complaint}", f"export MUJOCO_GL={backend}")
    install = surroundings.install_line(apt=_APT, elsewhere="libEGL and libGL")
    remedy = f"{install}{' &&' if 'apt-get' in surroundings.tools else ', then'} export MUJOCO_GL=egl"
    return Check("rendering", Status.WARN, f"{complaint}; egl and osmesa were tried in vain", remedy)
