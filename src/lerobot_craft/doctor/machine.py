"""Checks of the machine: cores, memory, disks, the Hub, devices, off-screen rendering and video decoding."""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from lerobot_craft.doctor.check import INSTALL, Check, Status, Surroundings, install_extra, installing
from lerobot_craft.doctor.probe import Probe, one_line

_GIB = 2**30
_GB = 10**9
DISK_FLOOR_BYTES = 20 * _GB
# Tried on a bare Debian 12: libegl1 with libgl1-mesa-dri is not enough, PyOpenGL needs libGL itself.
_GL_PACKAGES = "libegl1 libgl1"
_MUJOCO_OFF = ("disable", "disabled", "off", "false", "0")  # MuJoCo's own list
_RENDER_TIMEOUT_S = 30.0
# uv reads the driver and picks the build of torch that fits it; pip cannot.
_FIT_TORCH_TO_DRIVER = installing(
    "pip install uv && uv pip install --torch-backend=auto --reinstall-package torch "
    "--reinstall-package torchvision CRAFT"
)
_MEMINFO = Path("/proc/meminfo")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUP_MOUNT = Path("/sys/fs/cgroup")

TryBackend = Callable[[str], str | None]


def usable_cores() -> int:
    """The cores this process may use: its affinity, and no more than its control group's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def cpu_quota(membership: Path = _CGROUP_MEMBERSHIP, mount: Path = _CGROUP_MOUNT) -> float | None:
    """How many cores of CPU time this process may use, or None if there is no limit."""
    quotas = []
    for group in _groups("cpu", membership, mount):
        v2 = _read(group / "cpu.max").split()  # "max 100000" or "150000 100000"
        v1 = [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]  # "-1" is no limit
        quotas += [int(quota) / int(period) for quota, period in (v2[:2] or ("", ""), v1) if quota.isdecimal()]
    return min(quotas, default=None)


def memory_limit_bytes(membership: Path = _CGROUP_MEMBERSHIP, mount: Path = _CGROUP_MOUNT) -> int | None:
    """How much memory this process and its siblings may use, or None if there is no limit."""
    files = ("memory.max", "memory.limit_in_bytes")
    found = [_read(group / file) for group in _groups("memory", membership, mount) for file in files]
    return min((int(limit) for limit in found if limit.isdecimal()), default=None)


def _groups(controller: str, membership: Path, mount: Path) -> Iterator[Path]:
    """This process's control group for a controller and every ancestor, up to and including the mount.

    In a container the limit is lower than what the machine has, and a limit on any ancestor counts. Version 2 has one
    tree, version 1 one per controller. Inside a container the path from /proc may not exist below the mount; then the
    mount itself is the container's group.
    """
    for line in _read(membership).splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if hierarchy == "0":
            roots = [mount]
        elif controller in names:
            roots = [mount / controllers, mount / controller]
        else:
            continue
        for root in roots:
            group = root / path.lstrip("/")
            yield from (place for place in (group, *group.parents) if place.is_relative_to(root))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # not this generation, not this controller, or not Linux
        return ""


def check_memory(total_bytes: int | None, available_bytes: int | None, limit_bytes: int | None) -> Check:
    """How much memory there is, and how much of it this process may use."""
    if total_bytes is None:
        return Check("memory", Status.NOTE, "unknown on this system")
    value = f"{total_bytes / _GIB:.1f} GiB"
    if available_bytes is not None:
        value += f", {available_bytes / _GIB:.1f} GiB available"
    if limit_bytes is not None and limit_bytes < total_bytes:
        value += f", limited to {limit_bytes / _GIB:.1f} GiB by the control group"
    return Check("memory", Status.OK, value)


def memory_bytes(meminfo: Path = _MEMINFO) -> tuple[int | None, int | None]:
    """Total and available memory; None if this system does not say."""
    if meminfo.exists():
        kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
        return kilobytes["MemTotal"] * 1024, kilobytes.get("MemAvailable", 0) * 1024 or None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


@dataclass(frozen=True)
class Storage:
    """A place that craft or lerobot writes to: what it holds, where it is, and how to move it."""

    holds: str
    path: Path
    remedy: str


def storages(surroundings: Surroundings) -> list[Storage]:
    """Outputs, datasets and models: each directory by the rules of lerobot and huggingface_hub."""
    env = surroundings.env
    cache = Path(env.get("XDG_CACHE_HOME", surroundings.home / ".cache"))
    hf_home = _expand(env.get("HF_HOME", cache / "huggingface"))
    lerobot_home = Path(env.get("HF_LEROBOT_HOME", hf_home / "lerobot")).expanduser()
    hub = _expand(env.get("HF_HUB_CACHE", env.get("HUGGINGFACE_HUB_CACHE", hf_home / "hub")))
    return [
        Storage("outputs", surroundings.here, "cd /a/directory/on/a/larger/disk"),
        Storage("datasets", lerobot_home, "export HF_LEROBOT_HOME=/a/directory/on/a/larger/disk"),
        Storage("models", hub, "export HF_HUB_CACHE=/a/directory/on/a/larger/disk"),
    ]


def _expand(path: str | Path) -> Path:
    return Path(os.path.expandvars(path)).expanduser()


def check_disks(places: Sequence[Storage], surroundings: Surroundings) -> list[Check]:
    """Free space, one line per file system: places on one file system share its space."""
    shared: dict[int, list[Storage]] = {}
    for place in places:
        shared.setdefault(_nearest_existing(place.path).stat().st_dev, []).append(place)
    checks = []
    for together in shared.values():
        path = _nearest_existing(together[0].path)
        where = f"{surroundings.shorten(path)} ({', '.join(place.holds for place in together)})"
        remedy = " && ".join(place.remedy for place in together)
        checks.append(check_disk(shutil.disk_usage(path).free, where, remedy))
    return checks


def _nearest_existing(path: Path) -> Path:
    """The first parent that exists: a cache directory is created on its first use."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.access(place, os.F_OK))


def check_disk(free_bytes: int, where: str, remedy: str) -> Check:
    """Free space at one place."""
    value = f"{free_bytes / _GB:.0f} GB free at {where}"
    if free_bytes < DISK_FLOOR_BYTES:
        return Check("disk", Status.WARN, f"{value}, less than {DISK_FLOOR_BYTES / _GB:.0f} GB", remedy)
    return Check("disk", Status.OK, value)


def check_hub(env: Mapping[str, str]) -> Check:
    """Whether the Hub may be used, by the rule of huggingface_hub."""
    name = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if env.get(name)), None)
    if name is not None and env[name].upper() in ("1", "ON", "YES", "TRUE"):
        return Check("hub", Status.NOTE, f"offline ({name}={env[name]}): local datasets and policies only")
    return Check("hub", Status.NOTE, "online (HF_HUB_OFFLINE is not set)")


def check_torch(torch: Mapping[str, Any]) -> Check:
    """Torch imports, and for which devices it was built."""
    if torch.get("kind") == "ModuleNotFoundError":
        return Check("torch", Status.MISSING, one_line(torch["error"]), INSTALL)
    if "error" in torch:
        remedy = installing("pip install --force-reinstall torch torchvision CRAFT")
        return Check("torch", Status.MISSING, f"does not import: {one_line(torch['error'])}", remedy)
    return Check("torch", Status.OK, f"{torch['version']} ({_build(torch)} build)")


def check_devices(torch: Mapping[str, Any], surroundings: Surroundings) -> Check:
    """The devices to train on. A warning if there is an NVIDIA driver but torch sees no GPU."""
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


def check_threads(torch: Mapping[str, Any], core_count: int, surroundings: Surroundings) -> Check:
    """Threads against usable cores: more threads than cores make a step many times slower.

    Torch's own count is not enough: current releases cap it at the cores, but older ones and other OpenMP libraries
    use OMP_NUM_THREADS as it is.
    """
    asked = surroundings.env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    of_torch = torch.get("threads", 0)
    threads = max(of_torch, int(asked)) if asked.isdecimal() else of_torch
    source = "OMP_NUM_THREADS" if asked.isdecimal() and threads == int(asked) else "torch's own choice"
    cores = f"{core_count} usable core{'s' if core_count > 1 else ''}"
    if threads > core_count:
        value = f"{threads} ({source}) on {cores}: steps can take many times longer"
        return Check("threads", Status.WARN, value, f"export OMP_NUM_THREADS={core_count}")
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


def try_backend(backend: str, env: Mapping[str, str]) -> str | None:
    """Render with one MUJOCO_GL back-end ("" leaves the choice to MuJoCo): None if it works, else why not."""
    # MuJoCo reads an empty MUJOCO_GL like an absent one.
    with Probe("render", env={**env, "MUJOCO_GL": backend}, timeout_s=_RENDER_TIMEOUT_S) as probe:
        report = probe.report()
    finding = report.topic("render")
    if "error" in finding:
        return str(finding["error"])
    return None if finding["contrast"] else "every pixel came out alike"


def check_rendering(mujoco: str | None, surroundings: Surroundings, attempt: TryBackend) -> Check:
    """Off-screen rendering, which the simulators need: which back-end works, and the command that selects it."""
    if mujoco is None:
        return Check("rendering", Status.NOTE, "mujoco is not installed", install_extra("bench"))
    chosen = surroundings.env.get("MUJOCO_GL", "").strip().lower()
    if chosen in _MUJOCO_OFF:
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
    install = surroundings.install_line(apt=_GL_PACKAGES, elsewhere="libEGL and libGL")
    remedy = f"{install}{' &&' if 'apt-get' in surroundings.tools else ', then'} export MUJOCO_GL=egl"
    return Check("rendering", Status.WARN, f"{complaint}; egl and osmesa were tried in vain", remedy)


def check_pyav(pyav: Mapping[str, Any], torchcodec: Mapping[str, Any]) -> Check:
    """Whether pyav decodes a video made in memory. Without pyav and torchcodec there is no video at all."""
    if "error" not in pyav:
        return Check("pyav", Status.OK, f"{pyav['version']}, encodes and decodes ({pyav['codec']})")
    status = Status.MISSING if "error" in torchcodec else Status.WARN
    if pyav.get("kind") == "ModuleNotFoundError":
        return Check("pyav", status, "not installed: no video can be written", INSTALL)
    remedy = installing("pip install --force-reinstall av CRAFT")
    return Check("pyav", status, f"does not work: {one_line(pyav['error'])}", remedy)


def check_torchcodec(torchcodec: Mapping[str, Any], surroundings: Surroundings) -> Check:
    """The same video through torchcodec, the faster decoder; lerobot falls back to pyav."""
    if "error" not in torchcodec:
        value = f"{torchcodec['version']}, decodes with FFmpeg {torchcodec['ffmpeg']}"
        return Check("torchcodec", Status.OK, value)
    if torchcodec.get("kind") == "ModuleNotFoundError":
        value = f"{one_line(torchcodec['error'])}; pyav decodes instead, slower"
        return Check("torchcodec", Status.WARN, value, INSTALL)
    reason = loading_failure(torchcodec["error"])
    if reason is None:
        value = "finds no FFmpeg libraries; pyav decodes instead, slower"
        return Check("torchcodec", Status.WARN, value, surroundings.install_line(apt="ffmpeg", elsewhere="ffmpeg"))
    remedy = installing("pip install --upgrade torch torchcodec CRAFT")
    return Check("torchcodec", Status.WARN, f"does not work: {one_line(reason)}; pyav decodes instead", remedy)


def loading_failure(error: str) -> str | None:
    """Why torchcodec did not load, in one line; None if only FFmpeg is missing.

    Its message has one traceback per FFmpeg release that it knows. Most say only that this release is not installed;
    a line that says anything else is the reason.
    """
    causes = re.findall(r"^\s*(?:\w+Error): (?!Could not load this library)(.*)", error, flags=re.MULTILINE)
    if not causes:
        return error
    return next((cause for cause in causes if not re.search(r"lib(av|sw)\w+", cause)), None)
