"""What `craft doctor` checks: small functions from the surroundings to a `Check`; `examine` runs them all.

Whatever could kill the process (a GL back-end, a shared library that does not fit torch) is tried in a child process:
a broken machine must be reported and not crash the report.
"""

import importlib
from collections.abc import Generator, Iterator
from functools import partial

from lerobot_craft import __version__
from lerobot_craft.doctor.check import (
    EXTRAS,
    Check,
    Status,
    Surroundings,
    as_json,
    as_lines,
    check_craft,
    check_extra,
    check_lerobot,
    check_python,
    check_requirements,
    installed_version,
    is_ready,
    needs,
    verdict,
    wants_colour,
)
from lerobot_craft.doctor.machine import (
    check_devices,
    check_disks,
    check_hub,
    check_memory,
    check_pyav,
    check_rendering,
    check_threads,
    check_torch,
    check_torchcodec,
    memory_bytes,
    memory_limit_bytes,
    storages,
    try_backend,
    usable_cores,
)
from lerobot_craft.doctor.probe import Probe, one_line
from lerobot_craft.lerobot_api import supported_version

__all__ = [
    "Check",
    "Status",
    "Surroundings",
    "as_json",
    "as_lines",
    "examine",
    "is_ready",
    "verdict",
    "wants_colour",
]

# Importing torch takes 2 to 5 s from a warm disk; a network file system may take a minute.
_TORCH_TIMEOUT_S = 120.0


def examine(surroundings: Surroundings) -> Generator[Check]:
    """Every check, in the order a person reads them; the slow probe runs while the quick checks are shown."""
    with Probe("torch_and_video", env=surroundings.env, timeout_s=_TORCH_TIMEOUT_S) as probe:
        yield from _software(surroundings)
        yield check_memory(*memory_bytes(), memory_limit_bytes())
        yield from check_disks(storages(surroundings), surroundings)
        yield check_hub(surroundings.env)
        attempt = partial(try_backend, env=surroundings.env)
        yield check_rendering(installed_version("mujoco"), surroundings, attempt)
        report = probe.report()
    torch, pyav, torchcodec = map(report.topic, ("torch", "pyav", "torchcodec"))
    yield check_torch(torch)
    yield check_devices(torch, surroundings)
    yield check_threads(torch, usable_cores(), surroundings)
    yield check_pyav(pyav, torchcodec)
    yield check_torchcodec(torchcodec, surroundings)


def _software(surroundings: Surroundings) -> Iterator[Check]:
    yield check_python(surroundings)
    yield check_craft(__version__, installed_version("lerobot-craft"))
    yield check_lerobot(installed_version("lerobot"), supported_version(), surroundings.env, _failure("lerobot"))
    required = needs()
    yield check_requirements(required)
    if required:
        yield from [check_extra(extra, needs(extra)) for extra in EXTRAS]


def _failure(module: str) -> str | None:
    """Why a module does not import. Only for lerobot's top, which is cheap; its parts take many seconds."""
    try:
        importlib.import_module(module)
    except Exception as error:
        return one_line(str(error) or repr(error))
    return None
