"""Stock `lerobot-train` and `lerobot-eval` on our checkpoints: offline, each in a process of its own.

Nothing of ours but the flag. A second package needs a flag with another prefix, as `--env.discover_packages_path` has:
of two flags with the same name lerobot 0.6.1 loads the last one only.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from lerobot_craft.tiny.make import make_checkpoint
from tests.tiny import robot
from tests.tiny.reach_env import CORNERS, ReachEnvConfig, instruction_for

OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"}
ROOT = Path(__file__).parents[2]  # where `tests` is imported from
TINY = "--discover_packages_path=lerobot_craft.tiny"
REACH = ("--env.discover_packages_path=tests.tiny.reach_env", "--env.type=reach")


def run(script, *flags):
    """Run one of lerobot's scripts to its end; the test fails with its output if it does."""
    command = [sys.executable, "-m", f"lerobot.scripts.{script}", *flags]
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **OFFLINE, "PYTHONPATH": search}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


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
    run(
        "lerobot_train",
        *(TINY, f"--policy.path={policy}", "--policy.device=cpu"),
        *("--policy.push_to_hub=false", "--policy.optimizer_lr=0.001", "--policy.scheduler_warmup_steps=0"),
        *("--dataset.repo_id=local/made_up", f"--dataset.root={dataset}", f"--output_dir={output}"),
        *("--steps=2", "--save_freq=2", "--log_freq=1", "--batch_size=2", "--num_workers=0", "--wandb.enable=false"),
    )
    return output / "checkpoints" / "last" / "pretrained_model"


def changes(before, after):
    """Largest change of each tensor between two checkpoints of the same structure."""
    one, other = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert one.keys() == other.keys()
    return np.array([np.abs(other[name] - one[name]).max() for name in one])


@pytest.mark.slow  # two processes, each of which imports lerobot and trains
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy_type", ["pi0_fast", "pi0", "pi05", "smolvla"])
def test_lerobot_train_trains_and_fine_tunes_a_checkpoint(checkpoint, dataset, tmp_path, policy_type):
    start = checkpoint(policy_type)
    trained = train(start, dataset, tmp_path / "trained")
    tuned = train(trained, dataset, tmp_path / "tuned")
    for moved in (changes(start, trained), changes(trained, tuned)):
        assert (moved > 0).mean() > 0.5, "most tensors should have learnt something"
        assert moved.max() < 0.01, "two small steps lead no further: it began from other weights"


def make_policy_that_goes_to(target, policy_type, directory):
    """A checkpoint whose statistics are so narrow that every action leads to one corner, whatever the weights say."""
    from lerobot.envs import env_to_policy_features

    features = env_to_policy_features(ReachEnvConfig())
    heading, spread = 0.15 * np.array(CORNERS[target], np.float32), 0.005
    ranges = {"action": (heading, spread), "observation.state": (np.zeros(2, np.float32), 1.0)}
    return make_checkpoint(
        policy_type,
        directory,
        output_features={"action": features.pop("action")},
        input_features=features,
        dataset_stats={
            name: {
                "mean": middle,
                "std": np.full_like(middle, width),
                **dict.fromkeys(("min", "q01"), middle - width),
                **dict.fromkeys(("max", "q99"), middle + width),
            }
            for name, (middle, width) in ranges.items()
        },
        instructions=[instruction_for(corner) for corner in CORNERS],
        action_chunks=heading + spread * np.random.default_rng(0).uniform(-1, 1, (50, robot.CHUNK, 2)),
    )


@pytest.mark.slow  # a process that imports lerobot and runs two episodes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("policy_type", ["pi0_fast", "pi0", "pi05", "smolvla"])
def test_lerobot_eval_finishes_an_episode_of_each_task(tmp_path, policy_type):
    policy, output = make_policy_that_goes_to("red", policy_type, tmp_path / "policy"), tmp_path / "eval"
    run(
        "lerobot_eval",
        *(TINY, f"--policy.path={policy}", "--policy.device=cpu", *REACH, "--env.task=red,blue"),
        *("--eval.n_episodes=1", "--eval.batch_size=1", f"--output_dir={output}"),
    )
    groups = json.loads((output / "eval_info.json").read_text())["per_group"]
    assert {target: group["n_episodes"] for target, group in groups.items()} == {"red": 1, "blue": 1}
    assert {target: group["pc_success"] for target, group in groups.items()} == {"red": 100, "blue": 0}
