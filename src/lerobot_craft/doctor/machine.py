"""Checks of the machine itself: cores, memory, disk, and whether it may reach the Hub."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lerobot_craft.doctor.cgroup import cpu_quota
from lerobot_craft.doctor.check import Check, Status
from lerobot_craft.doctor.surroundings import Surroundings

_GIB = 2**30
_GB = 10**9
DISK_FLOOR_BYTES = 20 * _GB
_MEMINFO = Path("/proc/meminfo")


def usable_cores() -> int:
    """The cores this process may really use: its affinity, and no more than its control group's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def check_memory(total_bytes: int | None, available_bytes: int | None, limit_bytes: int | None) -> Check:
    """How much memory there is, and how much of it this process may take."""
    if total_bytes is None:
        return Check("memory", Status.NOTE, "unknown on this system")
    value = f"{total_bytes / _GIB:.1f} GiB"
    if available_bytes is not None:
        value += f", {available_bytes / _GIB:.1f} GiB available"
    if limit_bytes is not None and limit_bytes < total_bytes:
        value += f", limited to {limit_bytes / _GIB:.1f} GiB by the control group"
    return Check("memory", Status.OK, value)


def memory_bytes(meminfo: Path = _MEMINFO) -> tuple[int | None, int | None]:
    """Total and available memory, as far as this system tells."""
    if meminfo.exists():
        kilobytes = {line.partition(":")[0]: int(line.split()[1]) for line in meminfo.read_text().splitlines()}
        return kilobytes["MemTotal"] * 1024, kilobytes.get("MemAvailable", 0) * 1024 or None
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    return None, None


@dataclass(frozen=True)
class Storage:
    """A place that craft or lerobot writes to: what goes there, where it is, and how to move it."""

    holds: str
    path: Path
    remedy: str


def storages(surroundings: Surroundings) -> list[Storage]:
    """Outputs, datasets and models, each as lerobot and huggingface_hub look their directory up."""
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
    """Free space, one line per file system: places that share one share its space."""
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
    """Where the first write will go: caches are made when they are first used."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if os.access(place, os.F_OK))


def check_disk(free_bytes: int, where: str, remedy: str) -> Check:
    """Free space at one place."""
    value = f"{free_bytes / _GB:.0f} GB free at {where}"
    if free_bytes < DISK_FLOOR_BYTES:
        return Check("disk", Status.WARN, f"{value}, less than {DISK_FLOOR_BYTES / _GB:.0f} GB", remedy)
    return Check("disk", Status.OK, value)


def check_hub(env: Mapping[str, str]) -> Check:
    """Whether the Hub may be asked, by the rule of huggingface_hub."""
    name = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if env.get(name)), None)
    if name is not None and env[name].upper() in ("1", "ON", "YES", "TRUE"):
        return Check("hub", Status.NOTE, f"offline ({name}={env[name]}): local datasets and policies only")
    return Check("hub", Status.NOTE, "online (HF_HUB_OFFLINE is not set)")
