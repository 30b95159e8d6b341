"""Checks of torch, the devices it sees and the threads it may use."""

from collections.abc import Mapping
from itertools import starmap
from typing import Any

from lerobot_craft.doctor.check import Check, Status
from lerobot_craft.doctor.probe import one_line
from lerobot_craft.doctor.software import INSTALL, installing
from lerobot_craft.doctor.surroundings import Surroundings

_GIB = 2**30
# uv reads the driver and picks the build of torch that fits it; pip cannot.
_FIT_TORCH_TO_DRIVER = installing(
    "pip install uv && uv pip install --torch-backend=auto --reinstall-package torch "
    "--reinstall-package torchvision CRAFT"
)


def check_torch(torch: Mapping[str, Any]) -> Check:
    """Torch imports, and for which devices it was built."""
    if torch.get("kind") == "ModuleNotFoundError":
        return Check("torch", Status.MISSING, one_line(torch["error"]), INSTALL)
    if "error" in torch:
        remedy = installing("pip install --force-reinstall torch torchvision CRAFT")
        return Check("torch", Status.MISSING, f"does not import: {one_line(torch['error'])}", remedy)
    return Check("torch", Status.OK, f"{torch['version']} ({_build(torch)} build)")


def check_devices(torch: Mapping[str, Any], surroundings: Surroundings) -> Check:
    """The devices to train on; an NVIDIA driver whose GPU torch cannot see is worth a warning."""
    if "error" in torch:
        return Check("devices", Status.NOTE, "unknown, because torch does not import")
    if torch["cuda_devices"]:
        return Check("devices", Status.OK, "; ".join(starmap(_describe, enumerate(torch["cuda_devices"]))))
    if torch["mps"]:
        return Check("devices", Status.OK, "mps")
    if "nvidia-smi" not in surroundings.tools:
        return Check("devices", Status.NOTE, f"cpu only ({_build(torch)} build of torch, no NVIDIA driver here)")
    hidden = surroundings.env.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        value = f"cpu only: CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
        return Check("devices", Status.WARN, value, "unset CUDA_VISIBLE_DEVICES")
    reason = one_line(torch["cuda_complaint"] or f"this is a {_build(torch)} build")
    value = f"cpu only: there is an NVIDIA driver, but torch sees no GPU: {reason}"
    return Check("devices", Status.WARN, value, _FIT_TORCH_TO_DRIVER)


def check_threads(torch: Mapping[str, Any], usable_cores: int, surroundings: Surroundings) -> Check:
    """Threads against the cores this process may use: threads that wait for each other's core cost many times more.

    Torch's own count is not enough: current releases cap it at the cores, older ones and other OpenMP libraries
    take OMP_NUM_THREADS as it stands.
    """
    asked = surroundings.env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    of_torch = torch.get("threads", 0)
    threads = max(of_torch, int(asked)) if asked.isdecimal() else of_torch
    source = "OMP_NUM_THREADS" if asked.isdecimal() and threads == int(asked) else "torch's own choice"
    cores = f"{usable_cores} usable core{'s' if usable_cores > 1 else ''}"
    if threads > usable_cores:
        value = f"{threads} ({source}) on {cores}: steps can take many times longer"
        return Check("threads", Status.WARN, value, f"export OMP_NUM_THREADS={usable_cores}")
    if not threads:
        return Check("threads", Status.NOTE, f"unknown, on {cores}")
    return Check("threads", Status.OK, f"{threads} ({source}) on {cores}")


def _build(torch: Mapping[str, Any]) -> str:
    if torch["cuda_build"]:
        return f"CUDA {torch['cuda_build']}"
    return f"ROCm {torch['hip_build']}" if torch["hip_build"] else "CPU"


def _describe(index: int, device: Mapping[str, Any]) -> str:
    bf16 = "bf16" if device["bf16"] else "no bf16"
    return f"cuda:{index} {device['name']}, {device['memory_bytes'] / _GIB:.1f} GiB, {bf16}"
