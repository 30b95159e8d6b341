"""What a run left, and runs that are killed: for tests that compare an interrupted run with one that was not."""

import hashlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

# What a clock or the process measured: the rest of a logged step is the same in every run.
MEASURED = {"update_s", "dataloading_s", "samples_per_s", "retention_s"}


def digests(output_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of the last checkpoint, but for where lerobot's settings say that the policy came from."""
    last = output_dir / "checkpoints" / "last"
    files = sorted(path for path in last.rglob("*") if path.is_file() and path.name != "train_config.json")
    return {str(path.relative_to(last)): hashlib.sha256(_content(path)).hexdigest() for path in files}


def _content(path: Path) -> bytes:
    if path.name == "README.md":  # the line that started a run is not the one that resumed it
        return path.read_bytes().partition(b"## Command")[0]
    if path.name not in ("config.json", "craft_state.json"):
        return path.read_bytes()
    content = json.loads(path.read_text())
    if path.name == "config.json":
        del content["pretrained_path"]
    else:  # checksums: of files that are compared themselves, and of the two that say where the policy came from
        del content["sha256"], content["files"]
    return json.dumps(content, sort_keys=True).encode()


def metrics(output_dir: Path) -> list[dict]:
    """Logged steps without what a clock measured."""
    lines = (output_dir / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]


def logged_steps(output_dir: Path) -> int:
    path = output_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved_steps(output_dir: Path) -> list[int]:
    """Steps of the checkpoints that have their name."""
    directory = output_dir / "checkpoints"
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdigit()) if directory.is_dir() else []


def unfinished_saves(output_dir: Path) -> list[Path]:
    """Directories that a checkpoint is, or was, being written into."""
    directory = output_dir / "checkpoints"
    return sorted(directory.glob(".[0-9]*.tmp")) if directory.is_dir() else []


def resume_flags(output_dir: Path) -> list[str]:
    settings = output_dir / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
    return [f"--config_path={settings}", "--resume=true"]


def newest_resume_flags(output_dir: Path) -> list[str]:
    """As craft prints them: from the newest whole checkpoint, which a kill may have kept `last` from pointing at."""
    newest = output_dir / "checkpoints" / f"{saved_steps(output_dir)[-1]:06d}"
    return [f"--config_path={newest / 'pretrained_model' / 'train_config.json'}", "--resume=true"]


def assert_same_run(run: Path, expected: Path) -> None:
    """To the bit: the last checkpoint, every logged step, every anchor step."""
    assert digests(run) == digests(expected)
    assert metrics(run) == metrics(expected)
    for name in ("lambda_history.csv", "module_cosines.csv"):
        assert (run / name).read_text() == (expected / name).read_text()


def wait_until(is_time, command) -> None:
    """Come back as soon as `is_time()`; the command must still run then."""
    while not is_time():
        if command.poll() is not None:
            pytest.fail(f"it ended by itself: {command.log.read_text()[-3000:]}")
        time.sleep(0.0005)


def kill_when(is_time, flags, log):
    """Run `craft train` in a process of its own, and SIGKILL it as soon as `is_time()`."""
    command = [sys.executable, "-m", "lerobot_craft", "train", *flags]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=output) as child:
        child.log = log
        wait_until(is_time, child)
        child.send_signal(signal.SIGKILL)
