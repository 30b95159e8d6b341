import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lerobot_craft.doctor import Status
from lerobot_craft.doctor.cgroup import cpu_quota, memory_limit_bytes
from lerobot_craft.doctor.machine import (
    Storage,
    check_disk,
    check_disks,
    check_hub,
    check_memory,
    memory_bytes,
    storages,
    usable_cores,
)

GIB = 2**30
GB = 10**9


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("membership", "files", "quota", "limit"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n", "a/b/memory.max": "max\n"}, 1.5, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "400000 100000\n"}, 4.0, None),
        ("0::/\n", {"cpu.max": "200000 100000\n", "memory.max": "1073741824\n"}, 2.0, GIB),
        # A container told the host's path: only the mount itself exists.
        ("0::/docker/x\n", {"cpu.max": "50000 100000\n"}, 0.5, None),
        (
            "4:memory:/m\n1:cpu,cpuacct:/c\n0::/\n",
            {
                "cpu,cpuacct/c/cpu.cfs_quota_us": "300000\n",
                "cpu,cpuacct/c/cpu.cfs_period_us": "100000\n",
                "memory/m/memory.limit_in_bytes": "2147483648\n",
            },
            3.0,
            2 * GIB,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, None),
        ("", {}, None, None),
    ],
)
def test_cgroup_limits(tmp_path, membership, files, quota, limit):
    proc = write(tmp_path / "proc", membership)
    mount = tmp_path / "cgroup"
    for name, text in files.items():
        write(mount / name, text)
    assert cpu_quota(proc, mount) == quota
    assert memory_limit_bytes(proc, mount) == limit


def test_no_cgroups_no_limits(tmp_path):
    assert cpu_quota(tmp_path / "absent", tmp_path) is None


def test_usable_cores_are_those_of_the_affinity():
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    if hasattr(os, "sched_setaffinity"):
        code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        code += "from lerobot_craft.doctor.machine import usable_cores; print(usable_cores())"
        assert subprocess.check_output([sys.executable, "-c", code]) == b"1\n"


def test_a_quota_counts_whole_cores(monkeypatch):
    for quota, cores in ((0.5, 1), (1.9, 1), (1000.0, usable_cores())):
        monkeypatch.setattr("lerobot_craft.doctor.machine.cpu_quota", lambda quota=quota: quota)
        assert usable_cores() == cores
        monkeypatch.undo()


def test_memory(tmp_path):
    meminfo = write(tmp_path / "meminfo", "MemTotal:  1024 kB\nMemAvailable:  512 kB\nHugePages_Total:  0\n")
    assert memory_bytes(meminfo) == (2**20, 2**19)
    total, _ = memory_bytes(tmp_path / "absent")  # as on a Mac
    assert total is None or total > GIB // 4
    assert check_memory(8 * GIB, 6 * GIB, 2**63).value == "8.0 GiB, 6.0 GiB available"
    limited = check_memory(8 * GIB, None, 2 * GIB)
    assert limited.value == "8.0 GiB, limited to 2.0 GiB by the control group"
    assert check_memory(None, None, None).status is Status.NOTE


def test_a_full_disk_is_a_warning():
    assert check_disk(20 * GB, "~", "move it").remedy is None
    full = check_disk(20 * GB - 1, "~", "move it")
    assert (full.status, full.remedy) == (Status.WARN, "move it")


def test_one_line_per_file_system(surroundings, tmp_path):
    places = [Storage("outputs", tmp_path, "a"), Storage("datasets", tmp_path / "not" / "yet" / "there", "b")]
    (check,) = check_disks(places, surroundings)
    assert f"at {tmp_path} (outputs, datasets)" in check.value
    other = Path("/proc")
    if other.exists():
        assert len(check_disks([*places, Storage("models", other, "c")], surroundings)) == 2
    free = float(check.value.partition(" GB")[0])
    assert free == pytest.approx(shutil.disk_usage(tmp_path).free / GB, rel=0.1, abs=1)  # others write meanwhile


def test_a_full_disk_that_holds_everything_is_mended_for_everything(surroundings, tmp_path, monkeypatch):
    monkeypatch.setattr("lerobot_craft.doctor.machine.DISK_FLOOR_BYTES", shutil.disk_usage(tmp_path).total)
    places = [Storage("outputs", tmp_path, "cd elsewhere"), Storage("models", tmp_path, "export HF_HUB_CACHE=x")]
    (check,) = check_disks(places, surroundings)
    assert (check.status, check.remedy) == (Status.WARN, "cd elsewhere && export HF_HUB_CACHE=x")


HF_VARIANTS = [
    {},
    {"HF_HOME": "~/hf", "HF_HUB_OFFLINE": "1"},
    {"HF_HOME": "$HOME/hf", "HF_LEROBOT_HOME": "~/sets", "TRANSFORMERS_OFFLINE": "yes"},
    {"XDG_CACHE_HOME": "/xdg", "HF_HUB_CACHE": "~/hub", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "1"},
    {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_OFFLINE": "maybe"},
]
# The file is run by itself: importing its package would take torch along.
THEIR_ANSWER = """
import importlib.util, json, runpy
from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE
(lerobot,) = importlib.util.find_spec("lerobot").submodule_search_locations
home = runpy.run_path(f"{lerobot}/utils/constants.py")["HF_LEROBOT_HOME"]
print(json.dumps([str(home), HF_HUB_CACHE, HF_HUB_OFFLINE]))
"""


@pytest.mark.parametrize("variables", HF_VARIANTS)
def test_caches_and_offline_are_found_as_lerobot_finds_them(surroundings, variables):
    rest = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "XDG_", "TRANS"))
    }
    out = subprocess.check_output([sys.executable, "-c", THEIR_ANSWER], env=rest | variables)
    datasets, models, offline = json.loads(out)
    here = replace(surroundings, env=variables, home=Path.home())
    assert [str(place.path) for place in storages(here)] == ["/project", datasets, models]
    assert check_hub(variables).value.startswith("offline" if offline else "online")
