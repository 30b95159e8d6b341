"""Which OpenGL back-end MuJoCo draws with: chosen before MuJoCo is imported, because it looks only then."""

import ctypes
import os
import platform
from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

from lerobot_craft.doctor import Surroundings
from lerobot_craft.doctor.machine import check_rendering, try_backend
from lerobot_craft.doctor.software import install_extra
from lerobot_craft.errors import CraftError

_VARIABLE = "MUJOCO_GL"
# What each back-end loads, the preferred one first; PyOpenGL needs libGL itself beside libEGL.
_LIBRARIES = {"egl": ("libEGL.so.1", "libGL.so.1"), "osmesa": ("libOSMesa.so.8",)}


def import_mujoco() -> Any:
    """MuJoCo, with a back-end that fits this machine. Needs no graphics at all as long as nothing is drawn."""
    choose_backend(os.environ)  # processes started from here take it over
    try:
        import mujoco
    except ImportError as error:
        raise CraftError(f"The bench needs MuJoCo ({error}). Type: {install_extra('bench')}") from error
    return mujoco


def choose_backend(env: MutableMapping[str, str]) -> None:
    """Set MUJOCO_GL in an environment, unless the person has."""
    if not env.get(_VARIABLE) and platform.system() == "Linux":
        backend = pick_backend(_can_load, _can_draw)
        if backend is not None:
            env[_VARIABLE] = backend


def pick_backend(can_load: Callable[[str], bool], can_draw: Callable[[str], bool]) -> str | None:
    """The back-end to use, or None where no library for drawing without a display is there.

    To draw for a trial takes a process and two seconds, so it happens only where there is a choice.

    Args:
        can_load: whether a shared library is here.
        can_draw: whether a back-end really draws.
    """
    here = [backend for backend, libraries in _LIBRARIES.items() if all(map(can_load, libraries))]
    if len(here) > 1:
        return next(filter(can_draw, here), here[0])
    return here[0] if here else None


def no_drawing(error: Exception) -> CraftError:
    """Why nothing can be drawn here and the line that mends it, as `craft doctor` finds it."""
    mujoco = import_mujoco()
    observed = Surroundings.observe()
    # Our own choice is not the person's: the doctor is to try every back-end.
    env = {name: value for name, value in observed.env.items() if name != _VARIABLE}
    check = check_rendering(mujoco.__version__, replace(observed, env=env), lambda backend: try_backend(backend, env))
    remedy = f" Type: {check.remedy}" if check.remedy else ""
    return CraftError(f"MuJoCo cannot draw here ({type(error).__name__}: {error}); {check.value}.{remedy}")


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _can_draw(backend: str) -> bool:
    return try_backend(backend, os.environ) is None
