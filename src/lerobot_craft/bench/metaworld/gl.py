"""Chooses MuJoCo's OpenGL back-end, which must happen before MuJoCo is imported."""

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
# The libraries of each back-end, in order of preference; PyOpenGL needs libGL in addition to libEGL.
_LIBRARIES = {"egl": ("libEGL.so.1", "libGL.so.1"), "osmesa": ("libOSMesa.so.8",)}


def import_mujoco() -> Any:
    """Import MuJoCo with a back-end that fits this machine. Graphics are only needed for drawing."""
    choose_backend(os.environ)  # child processes inherit it
    try:
        import mujoco
    except ImportError as error:
        raise CraftError(f"The bench needs MuJoCo ({error}). Type: {install_extra('bench')}") from error
    return mujoco


def choose_backend(env: MutableMapping[str, str]) -> None:
    """Set MUJOCO_GL in an environment, unless the user has set it."""
    if not env.get(_VARIABLE) and platform.system() == "Linux":
        backend = pick_backend(_can_load, _can_draw)
        if backend is not None:
            env[_VARIABLE] = backend


def pick_backend(can_load: Callable[[str], bool], can_draw: Callable[[str], bool]) -> str | None:
    """The back-end to use; None if no library can draw without a display.

    A test drawing takes a process and two seconds, so it is only done if there is a choice.

    Args:
        can_load: Whether a shared library can be loaded.
        can_draw: Whether a back-end can really draw.
    """
    here = [backend for backend, libraries in _LIBRARIES.items() if all(map(can_load, libraries))]
    if len(here) > 1:
        return next(filter(can_draw, here), here[0])
    return here[0] if here else None


def no_drawing(error: Exception) -> CraftError:
    """Why nothing can be drawn here, and the command that fixes it, as in `craft doctor`."""
    mujoco = import_mujoco()
    observed = Surroundings.observe()
    # Remove our own choice, so that the doctor tries every back-end.
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
