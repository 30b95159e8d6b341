"""What the control group of this process allows: in a container it is less than the machine has.

Both generations are read: v2 has one tree, v1 one per controller. A limit set on any ancestor counts. Inside a
container the path that /proc tells may not exist below the mount; then the mount itself is the container's group.
"""

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def cpu_quota(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> float | None:
    """How many cores' worth of time this process may use, or None if nothing limits it."""
    quotas = []
    for group in _groups("cpu", membership, mount):
        v2 = _read(group / "cpu.max").split()  # "max 100000" or "150000 100000"
        v1 = [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]  # "-1" is no limit
        quotas += [int(quota) / int(period) for quota, period in (v2[:2] or ("", ""), v1) if quota.isdecimal()]
    return min(quotas, default=None)


def memory_limit_bytes(membership: Path = _MEMBERSHIP, mount: Path = _MOUNT) -> int | None:
    """How much memory this process and its siblings may use, or None if nothing limits it."""
    files = ("memory.max", "memory.limit_in_bytes")
    found = [_read(group / file) for group in _groups("memory", membership, mount) for file in files]
    return min((int(limit) for limit in found if limit.isdecimal()), default=None)


def _groups(controller: str, membership: Path, mount: Path) -> Iterator[Path]:
    """This process's group for a controller and every ancestor, up to and with the mount."""
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
