import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "full_size.py"
# Holds 200 MiB before the first step's line (twice that while it makes them) and 60 MiB from then on; opens a file
# three times.
PROGRAM = """
import pathlib, sys, time
for _ in range(3):
    pathlib.Path(sys.argv[1]).read_bytes()
held = bytearray(b"x" * (200 << 20))
time.sleep(0.5)
del held
for step in (1, 2, 3):
    print(f"Drift at step {step + 5}")
    print(f"INFO step:{step} smpl:2" if step == 1 else f"INFO Step {step}/3 | loss=1.4", flush=True)
    held = bytearray(b"x" * (60 << 20))
    time.sleep(0.5)
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and inotify")


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        return runpy.run_path(str(SCRIPT))


@pytest.mark.slow  # eleven processes that import lerobot
@pytest.mark.timeout(1800)
def test_every_command_runs_on_a_tiny_policy(script, tmp_path):
    flags = ["--tiny", "--policy=smolvla", "--steps=4", f"--scratch_dir={tmp_path / 'scratch'}"]
    script["main"]([*flags, f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("full-size-*.json"))
    found = report["policies"]["smolvla"]
    assert found["resumed"]["to_the_bit"]
    assert found["episode"]["episodes"] == 1
    assert found["rows"]["CRaFT"]["step_ratio"] > 1
    opened = {name: row["weights_file_opened"] for name, row in found["rows"].items()}
    assert opened["CRaFT"] > opened["plain"] >= 1  # lerobot's loader; CRaFT compares the policy with the file
    assert all(row["estimate_to_measured"] for row in found["rows"].values())
    assert not (tmp_path / "scratch").exists()


def test_a_process_is_watched_from_outside(script, tmp_path):
    weights = tmp_path / "weights"
    weights.write_bytes(b"weights")
    seen = script["watch"](["-c", PROGRAM, str(weights)], tmp_path / "log", {}, weights)
    assert list(seen.steps) == list(seen.worked) == [1, 2, 3]
    assert seen.opened == 3
    assert seen.starting_bytes > 200 << 20
    assert 60 << 20 < seen.stepping_bytes < 250 << 20
    assert seen.worked[3] < seen.steps[3]  # it mostly sleeps
    assert "Step 3/3" in (tmp_path / "log").read_text()


def test_a_process_is_killed_after_a_step(script, tmp_path):
    seen = script["watch"](["-c", PROGRAM, str(SCRIPT)], tmp_path / "log", {}, SCRIPT, kill_after=2)
    assert list(seen.steps) == [1, 2]


def test_a_command_that_fails_is_no_measurement(script, tmp_path):
    with pytest.raises(RuntimeError, match="so it was"):
        script["watch"](["-c", "raise SystemExit('so it was')"], tmp_path / "log", {}, SCRIPT)


def test_weights_are_written_tensor_by_tensor(script, tmp_path):
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2).to(torch.bfloat16))
    script["write_weights"](module, tmp_path / "model.safetensors", seed=0)
    found = load_file(tmp_path / "model.safetensors")
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in module.state_dict().items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == expected
    assert found["1.weight"].eq(1).all()
    assert 0 < found["2.weight"].float().std() < 0.1


def test_tied_weights_are_written_once(script, tmp_path):
    with torch.device("meta"):
        module = nn.ModuleDict({"words": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
        module["head"].weight = module["words"].weight
    script["write_weights"](module, tmp_path / "model.safetensors", seed=0)
    assert list(load_file(tmp_path / "model.safetensors")) == ["words.weight"]


def test_a_second_read_of_a_file_is_not_one_of_the_disk(script, tmp_path):
    from_disk, file = script["bytes_from_disk"], tmp_path / "weights"
    file.write_bytes(bytes(8 << 20))

    def read():
        before = from_disk()
        file.read_bytes()
        return from_disk() - before

    script["forget_file"](file)
    first = read()
    if not first:
        pytest.skip("no disk below tmp_path")
    assert first >= 8 << 20
    assert read() == 0
    script["forget_file"](file)
    assert read() >= 8 << 20
