"""Kill at any moment, resume, and have the run that was never killed, to the bit."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STEPS = 11
TIMES = {"update_s", "dataloading_s", "samples_per_s", "retention_s"}


def digests(output_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of the last checkpoint, but for where lerobot's settings say that the policy came from."""
    last = output_dir / "checkpoints" / "last"
    files = sorted(path for path in last.rglob("*") if path.is_file() and path.name != "train_config.json")
    return {str(path.relative_to(last)): hashlib.sha256(content(path)).hexdigest() for path in files}


def content(path: Path) -> bytes:
    if path.name != "config.json":
        return path.read_bytes()
    settings = json.loads(path.read_text())
    del settings["pretrained_path"]
    return json.dumps(settings, sort_keys=True).encode()


def metrics(output_dir: Path) -> list[dict]:
    """Logged steps without what a clock measured."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def logged_steps(output_dir: Path) -> int:
    path = output_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when(is_time, flags, log):
    """Run `craft train` in a process of its own, and SIGKILL it as soon as `is_time()`."""
    command = [sys.executable, "-m", "lerobot_craft", "train", *flags]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as child:
        while not is_time():
            if child.poll() is not None:
                pytest.fail(f"it ended by itself: {log.read_text()[-3000:]}")
            time.sleep(0.005)
        child.send_signal(signal.SIGKILL)


def resume_flags(output_dir: Path) -> list[str]:
    settings = output_dir / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
    return [f"--config_path={settings}", "--resume=true"]


@pytest.fixture
def run_flags(train_flags, anchor_data, tmp_path):
    """Flags of a run under the constraint, with everything that has a state: dropout, multipliers, anchor order."""

    def flags(policy_type, output_dir, save_freq, **changes):
        return [
            *train_flags(policy_type, output_dir, steps=STEPS, batch_size=8, save_freq=save_freq, **changes),
            "--craft.enabled=true",
            "--craft.retention_mode=action",
            f"--craft.anchor_cache_dir={tmp_path / 'cache'}",
            "--craft.old_dataset.repo_id=local/old",
            f"--craft.old_dataset.root={anchor_data / 'old'}",
            "--craft.num_anchors=18",
            "--craft.anchor_batch_size=4",
            "--craft.retention_freq=2",
            "--craft.dual_rule=pi",
            "--craft.lambda_smoothing=0.5",
            "--craft.epsilon_start=0.001",
            "--craft.epsilon_end=0.0001",
            "--craft.log_craft_metrics_freq=4",
        ]

    return flags


# 36 frames in batches of 8: an epoch has 5 steps, so a checkpoint at 4 is in the middle of one, at 5 at its end.
@pytest.mark.parametrize(("save_freq", "killed_after"), [(4, 6), (5, 5)])
def test_killed_and_resumed_is_never_killed(save_freq, killed_after, run_flags, craft_train, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert craft_train(*run_flags("smolvla", whole, save_freq)) == 0
    kill_when(
        lambda: logged_steps(broken) >= killed_after and (broken / "checkpoints" / "last").exists(),
        run_flags("smolvla", broken, save_freq),
        tmp_path / "log",
    )
    assert logged_steps(broken) < STEPS, "it was killed too late to show anything"
    assert craft_train(*resume_flags(broken)) == 0
    assert digests(broken) == digests(whole)
    assert metrics(broken) == metrics(whole)
    assert (broken / "lambda_history.csv").read_text() == (whole / "lambda_history.csv").read_text()
