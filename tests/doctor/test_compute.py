from dataclasses import replace

import pytest

from lerobot_craft.doctor import Status
from lerobot_craft.doctor.compute import check_devices, check_threads, check_torch

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
