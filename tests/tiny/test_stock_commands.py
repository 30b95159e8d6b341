"""Stock `lerobot-train` on our checkpoints: offline, in a process of its own, with nothing of ours but the flag."""

import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.tiny import robot

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Two short episodes with pictures, one per instruction."""
    from lerobot.datasets import LeRobotDataset

    root = tmp_path_factory.mktemp("data") / "made_up"
    picture = {"dtype": "image", "shape": (robot.SIDE, robot.SIDE, 3), "names": ["height", "width", "channels"]}
    features = {
        **dict.fromkeys(robot.CAMERAS, picture),
        "observation.state": {"dtype": "float32", "shape": (robot.STATE_DIM,), "names": None},
        "action": {"dtype": "float32", "shape": (robot.ACTION_DIM,), "names": None},
    }
    dataset = LeRobotDataset.create("local/made_up", fps=10, features=features, root=root, use_videos=False)
    rng = np.random.default_rng(0)
    for instruction in robot.INSTRUCTIONS[:2]:
        for action in robot.chunks(count=2).reshape(-1, robot.ACTION_DIM):
            frame = {camera: rng.integers(0, 255, picture["shape"], dtype=np.uint8) for camera in robot.CAMERAS}
            state = rng.normal(size=robot.STATE_DIM).astype(np.float32)
            dataset.add_frame({**frame, "observation.state": state, "action": action, "task": instruction})
        dataset.save_episode()
    dataset.finalize()
    return root


def train(policy, dataset, output):
    """Run two steps and return the checkpoint's directory."""
    command = [
        *(sys.executable, "-m", "lerobot.scripts.lerobot_train"),
        *("--discover_packages_path=lerobot_craft.tiny", f"--policy.path={policy}", "--policy.device=cpu"),
        *("--policy.push_to_hub=false", "--policy.optimizer_lr=0.001", "--policy.scheduler_warmup_steps=0"),
        *("--dataset.repo_id=local/made_up", f"--dataset.root={dataset}", f"--output_dir={output}"),
        *("--steps=2", "--save_freq=2", "--log_freq=1", "--batch_size=2", "--num_workers=0", "--wandb.enable=false"),
    ]
    done = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"
    return output / "checkpoints" / "last" / "pretrained_model"


def changes(before, after):
    """Largest change of each tensor between two checkpoints of the same structure."""
    one, other = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert one.keys() == other.keys()
    return np.array([np.abs(other[name] - one[name]).max() for name in one])


@pytest.mark.slow  # two processes, each of which imports lerobot and trains
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy_type", ["pi0_fast", "smolvla"])
def test_lerobot_train_trains_and_fine_tunes_a_checkpoint(checkpoint, dataset, tmp_path, policy_type):
    start = checkpoint(policy_type)
    trained = train(start, dataset, tmp_path / "trained")
    tuned = train(trained, dataset, tmp_path / "tuned")
    for moved in (changes(start, trained), changes(trained, tuned)):
        assert (moved > 0).mean() > 0.5, "most tensors should have learnt something"
        assert moved.max() < 0.01, "two small steps lead no further: it began from other weights"
