"""A checkpoint of `craft train` in stock `lerobot-eval`: the line that the summary prints, and the same episodes."""

import ast
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.tiny.reach_env import ReachEnv, instruction_for
from tests.tiny.test_stock_commands import REACH, make_policy_that_goes_to
from tests.warm_process import environment

EPISODES = 3


def record(root: Path, target: str, episodes: int = 2) -> Path:
    """A dataset of straight walks to a corner."""
    from lerobot.datasets import LeRobotDataset

    picture = {"dtype": "image", "shape": (32, 32, 3), "names": ["height", "width", "channels"]}
    features = {
        "observation.images.top": picture,
        "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }
    dataset = LeRobotDataset.create(f"local/{target}", fps=10, features=features, root=root, use_videos=False)
    env = ReachEnv(target)
    for seed in range(episodes):
        seen, _ = env.reset(seed=seed)
        done = False
        while not done:
            way = env.corner - seen["agent_pos"]
            action = np.clip(way, -0.15, 0.15).astype(np.float32)
            frame = {"observation.images.top": seen["pixels"]["top"], "observation.state": seen["agent_pos"]}
            dataset.add_frame({**frame, "action": action, "task": instruction_for(target)})
            seen, _, done, _, _ = env.step(action)
        dataset.save_episode()
    dataset.finalize()
    return root


def in_loop(log: str) -> dict:
    """What the run itself found in the environment after its last step, by suite."""
    found = re.findall(r"Suite (\w+) aggregated: (\{.*\})", log)
    return {suite: ast.literal_eval(text) for suite, text in found}


def printed_line(log: str) -> list[str]:
    return shlex.split(re.search(r" (lerobot-eval .*)", log)[1])


@pytest.mark.slow  # two processes, each of which imports lerobot
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy_type", ["pi0_fast", "smolvla"])
def test_the_printed_line_gives_the_episodes_of_the_run(policy_type, warm_process, tmp_path):
    teacher = make_policy_that_goes_to("red", policy_type, tmp_path / "teacher")
    old, new = record(tmp_path / "old", "red"), record(tmp_path / "new", "blue")
    flags = {
        "policy.path": teacher,
        "policy.device": "cpu",
        "policy.push_to_hub": "false",
        "dataset.repo_id": "local/blue",
        "dataset.root": new,
        "output_dir": tmp_path / "run",
        "steps": 2,
        "batch_size": 2,
        "num_workers": 0,
        "env.task": "red,blue",
        "env.episode_length": 20,
        "env_eval_freq": 2,
        "eval.n_episodes": EPISODES,
        "eval.batch_size": 1,
        "seed": 5,
        "craft.enabled": "true",
        "craft.retention_mode": "action",
        "craft.retention_freq": 1,
        "craft.anchor_batch_size": 2,
        "craft.old_dataset.repo_id": "local/red",
        "craft.old_dataset.root": old,
        "craft.num_anchors": 6,
    }
    argv = ["train", *REACH, *(f"--{name}={value}" for name, value in flags.items())]
    assert warm_process.run(argv, tmp_path / "log") == 0
    log = (tmp_path / "log").read_text()
    assert warm_process.run(argv, tmp_path / "log_again") == 2, "the directory holds a run"
    _, *resume = shlex.split((tmp_path / "log_again").read_text().splitlines()[-1])
    assert warm_process.run([*resume, "--steps=3"], tmp_path / "log_resumed") == 0, "it finds the environment again"

    program, *line = printed_line(log)
    command = [Path(sys.executable).with_name(program), *line]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

    (info,) = (tmp_path / "outputs" / "eval").rglob("eval_info.json")
    stock, ours = json.loads(info.read_text()), in_loop(log)
    assert {target: group["n_episodes"] for target, group in stock["per_group"].items()} == {"red": 3, "blue": 3}
    for target, pc_success in {"red": 100, "blue": 0}.items():
        here, there = stock["per_group"][target], ours["per_group"][target]
        assert here["pc_success"] == there["pc_success"] == pc_success
        # smolvla draws noise, which a run and lerobot-eval do from different places; its actions differ by thousandths.
        exactly = 1e-5 if policy_type == "pi0_fast" else 0.5
        assert here["avg_sum_reward"] == pytest.approx(there["avg_sum_reward"], abs=exactly)
