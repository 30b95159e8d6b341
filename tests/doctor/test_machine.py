import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lerobot_craft.doctor import Status
from lerobot_craft.doctor.machine import (
    Storage,
    check_devices,
    check_disk,
    check_disks,
    check_hub,
    check_memory,
    check_pyav,
    check_rendering,
    check_threads,
    check_torch,
    check_torchcodec,
    cpu_quota,
    loading_failure,
    memory_bytes,
    memory_limit_bytes,
    storages,
    try_backend,
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


CPU = {
    "version": "2.11.0+cpu",
    "cuda_build": None,
    "hip_build": None,
    "cuda_devices": [],
    "cuda_complaint": None,
    "mps": False,
    "threads": 2,
}
CUDA = CPU | {"version": "2.11.0", "cuda_build": "13.0"}
A100 = {"name": "NVIDIA A100", "memory_bytes": 85_094_825_984, "bf16": True}
T4 = {"name": "Tesla T4", "memory_bytes": 15_828_320_256, "bf16": False}


@pytest.fixture
def with_driver(surroundings):
    return replace(surroundings, tools=frozenset({"nvidia-smi"}))


def test_torch():
    assert check_torch(CUDA).value == "2.11.0 (CUDA 13.0 build)"
    assert check_torch(CPU | {"hip_build": "6.4"}).value == "2.11.0+cpu (ROCm 6.4 build)"


def test_torch_that_is_absent_or_broken_fails():
    absent = check_torch({"error": "No module named 'torch'", "kind": "ModuleNotFoundError"})
    assert (absent.status, absent.remedy) == (Status.MISSING, "pip install .  # in a clone of CRaFT")
    broken = check_torch({"error": "libcudart.so.13: cannot open\nmore", "kind": "OSError"})
    assert (broken.status, broken.value) == (Status.MISSING, "does not import: libcudart.so.13: cannot open")


def test_gpus_are_named_with_memory_and_bf16(surroundings):
    check = check_devices(CUDA | {"cuda_devices": [A100, T4]}, surroundings)
    assert check.status is Status.OK
    assert check.value == "cuda:0 NVIDIA A100, 79.3 GiB, bf16; cuda:1 Tesla T4, 14.7 GiB, no bf16"


def test_a_mac_has_mps(surroundings):
    assert check_devices(CPU | {"mps": True}, surroundings).value == "mps"


def test_a_cuda_build_without_a_gpu_is_a_note(surroundings):
    check = check_devices(CUDA, surroundings)
    assert (check.status, check.remedy) == (Status.NOTE, None)


@pytest.mark.parametrize(
    ("torch", "reason"),
    [(CPU, "this is a CPU build"), (CUDA | {"cuda_complaint": "driver too old"}, "driver too old")],
)
def test_a_driver_whose_gpu_torch_does_not_see_is_a_warning(with_driver, torch, reason):
    check = check_devices(torch, with_driver)
    assert check.status is Status.WARN
    assert reason in check.value
    assert "--torch-backend=auto" in check.remedy
    assert check.remedy.endswith(" .  # in a clone of CRaFT")


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_hidden_gpu_is_uncovered(with_driver, hidden):
    check = check_devices(CUDA, replace(with_driver, env={"CUDA_VISIBLE_DEVICES": hidden}))
    assert (check.status, check.remedy) == (Status.WARN, "unset CUDA_VISIBLE_DEVICES")


def test_devices_of_a_broken_torch_are_unknown(surroundings):
    assert check_devices({"error": "boom", "kind": "OSError"}, surroundings).status is Status.NOTE


@pytest.mark.parametrize(
    ("torch_threads", "omp", "cores", "status"),
    [
        (2, None, 2, "ok"),
        (2, "2", 2, "ok"),
        (1, "1", 2, "ok"),
        (2, "16", 2, "warn"),  # torch caps its own count, other OpenMP libraries do not
        (64, None, 4, "warn"),  # a container with a quota: torch counts the machine's cores
        (2, "3,2", 2, "warn"),  # OpenMP's list form: the first is the outer level
        (2, "many", 2, "ok"),
    ],
)
def test_threads(surroundings, torch_threads, omp, cores, status):
    env = {} if omp is None else {"OMP_NUM_THREADS": omp}
    check = check_threads(CPU | {"threads": torch_threads}, cores, replace(surroundings, env=env))
    assert check.status == status
    assert check.remedy == (f"export OMP_NUM_THREADS={cores}" if status == "warn" else None)


def test_threads_without_torch(surroundings):
    assert check_threads({"error": "boom"}, 2, surroundings).status is Status.NOTE
    asked = replace(surroundings, env={"OMP_NUM_THREADS": "8"})
    assert check_threads({"error": "boom"}, 2, asked).status is Status.WARN


MUJOCO = "3.9.0"


def renders_with(*working):
    """A machine on which just these back-ends render."""
    return lambda backend: None if backend in working else "no GL here"


def test_without_mujoco_it_is_a_note(surroundings):
    check = check_rendering(None, surroundings, renders_with("egl"))
    assert (check.status, check.remedy) == (Status.NOTE, "pip install 'lerobot-craft[bench]'")


def test_rendering_that_is_switched_off_is_left_alone(surroundings):
    off = replace(surroundings, env={"MUJOCO_GL": "Off"})
    assert check_rendering(MUJOCO, off, renders_with()).status is Status.NOTE


@pytest.mark.parametrize(
    ("env", "working", "status", "remedy"),
    [
        ({"MUJOCO_GL": "egl"}, ("egl",), "ok", None),
        ({"MUJOCO_GL": "EGL "}, ("egl",), "ok", None),
        ({"MUJOCO_GL": "osmesa"}, ("egl", "osmesa"), "ok", None),
        ({"DISPLAY": ":0"}, ("",), "ok", None),
        ({"MUJOCO_GL": "osmesa"}, ("egl",), "warn", "export MUJOCO_GL=egl"),
        ({"MUJOCO_GL": "egl"}, ("osmesa",), "warn", "export MUJOCO_GL=osmesa"),
        ({"DISPLAY": ":0"}, ("egl",), "warn", "export MUJOCO_GL=egl"),
        ({}, ("egl", "osmesa"), "warn", "export MUJOCO_GL=egl"),
        ({}, ("osmesa",), "warn", "export MUJOCO_GL=osmesa"),
        ({}, (), "warn", "apt-get update && apt-get install -y libegl1 libgl1 && export MUJOCO_GL=egl"),
        (
            {"MUJOCO_GL": "egl"},
            (),
            "warn",
            "apt-get update && apt-get install -y libegl1 libgl1 && export MUJOCO_GL=egl",
        ),
    ],
)
def test_the_line_leads_to_a_back_end_that_works(surroundings, env, working, status, remedy):
    check = check_rendering(MUJOCO, replace(surroundings, env=env), renders_with(*working))
    assert (check.status, check.remedy) == (status, remedy)


def test_a_mac_has_one_back_end(surroundings):
    mac = replace(surroundings, system="Darwin")
    assert check_rendering(MUJOCO, mac, renders_with("")).status is Status.OK
    misled = replace(mac, env={"MUJOCO_GL": "egl"})
    assert check_rendering(MUJOCO, misled, renders_with("")).remedy == "unset MUJOCO_GL"


def test_a_back_end_really_renders_here():
    failures = {backend: try_backend(backend, os.environ) for backend in ("egl", "osmesa", "")}
    if None not in failures.values():
        pytest.skip(f"no GL back-end on this machine: {failures}")


def test_the_reason_is_mujocos_own():
    assert "invalid value for environment variable MUJOCO_GL" in try_backend("nonsense", os.environ)


@pytest.mark.parametrize(
    ("mujoco", "reason"),
    [
        ("import os; os.abort()", "was killed by SIGABRT"),
        (
            """
import numpy
class Thing:
    from_xml_string = classmethod(lambda cls, xml: cls())
    def __init__(self, *_): pass
    def __enter__(self): return self
    def __exit__(self, *_): pass
    def update_scene(self, data): pass
    def render(self): return numpy.zeros((64, 64, 3), numpy.uint8)
MjModel = MjData = Renderer = mj_forward = Thing
""",
            "every pixel came out alike",
        ),
    ],
)
def test_a_back_end_that_aborts_or_paints_nothing_does_not_work(tmp_path, mujoco, reason):
    (tmp_path / "mujoco.py").write_text(mujoco)
    assert try_backend("egl", {**os.environ, "PYTHONPATH": str(tmp_path)}) == reason


WORKS = {"version": "15.1.0", "codec": "libsvtav1", "ffmpeg": 7}
ABSENT = {"error": "No module named 'av'", "kind": "ModuleNotFoundError"}
BROKEN = {"error": "decoded grey levels [0.0] instead of [80]", "kind": "ValueError"}

# The shape of torchcodec's own message, one part per FFmpeg release.
NOT_INSTALLED = """FFmpeg version 8:
Traceback (most recent call last):
OSError: libavutil.so.60: cannot open shared object file: No such file or directory
OSError: Could not load this library: /somewhere/libtorchcodec_core8.so
"""
NOT_FITTING = """FFmpeg version 7:
Traceback (most recent call last):
OSError: /somewhere/libtorchcodec_core7.so: undefined symbol: _ZN3c105ErrorC2E
OSError: Could not load this library: /somewhere/libtorchcodec_core7.so
"""
UNLOADABLE = {"error": f"Could not load libtorchcodec. Likely causes:\n{NOT_INSTALLED}", "kind": "RuntimeError"}


@pytest.mark.parametrize(
    ("pyav", "torchcodec", "status"),
    [
        (WORKS, WORKS, "ok"),
        (WORKS, UNLOADABLE, "ok"),
        (ABSENT, WORKS, "warn"),
        (ABSENT, UNLOADABLE, "missing"),
        (BROKEN, UNLOADABLE, "missing"),
    ],
)
def test_without_any_decoder_there_is_no_video(pyav, torchcodec, status):
    check = check_pyav(pyav, torchcodec)
    assert check.status == status
    assert (check.remedy is None) is (status == "ok")


def test_torchcodec_without_ffmpeg_is_a_warning_that_installs_it(surroundings):
    check = check_torchcodec(UNLOADABLE, surroundings)
    assert check.status is Status.WARN
    assert check.value.startswith("finds no FFmpeg libraries")
    assert check.remedy.endswith("apt-get install -y ffmpeg")


def test_torchcodec_that_does_not_fit_torch_is_told_apart(surroundings):
    check = check_torchcodec({"error": NOT_INSTALLED + NOT_FITTING, "kind": "RuntimeError"}, surroundings)
    assert "undefined symbol" in check.value
    assert check.remedy.startswith("pip install --upgrade torch torchcodec")
    assert loading_failure("something else altogether") == "something else altogether"


def test_torchcodec_absent_or_wrong_is_a_warning(surroundings):
    assert check_torchcodec(WORKS, surroundings).status is Status.OK
    assert check_torchcodec(ABSENT, surroundings).remedy == "pip install .  # in a clone of CRaFT"
    assert "grey levels" in check_torchcodec(BROKEN, surroundings).value


def test_the_real_message_of_a_real_failure_is_understood(surroundings):
    """Whatever torchcodec says on this machine when no FFmpeg can be found must read as just that."""
    script = (
        "import json, sys\n"
        "try:\n    import torchcodec\nexcept RuntimeError as error:\n    print(json.dumps(str(error)))\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    if not out:
        pytest.skip("torchcodec loads here, so there is no message to read")
    assert loading_failure(json.loads(out)) is None
