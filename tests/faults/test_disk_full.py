"""No room for a checkpoint: the run ends with a sentence, the checkpoint before it is whole, and once there is room
the run goes on as if nothing had been."""

import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from tests.faults.runs import assert_same_run, saved_steps, unfinished_saves, wait_until
from tests.warm_process import environment

STEPS = 8
ENOUGH_FOR_LOGS = 300_000  # bytes; the weights alone have more


@pytest.fixture
def whole(run_flags, warm_process, tmp_path):
    """A run that always had room; it leaves the anchors' cache for the others too."""
    flags = run_flags("smolvla", tmp_path / "whole", steps=STEPS, save_freq=1)
    assert warm_process.run(["train", *flags], tmp_path / "log") == 0
    return tmp_path / "whole"


def way_on(said):
    """The arguments of the line that a run ended with."""
    craft, *argv = shlex.split(said.splitlines()[-1])
    assert craft == "craft"
    return argv


@pytest.mark.slow  # four runs
@pytest.mark.timeout(600)
def test_a_checkpoint_that_may_not_grow_leaves_the_one_before(whole, run_flags, warm_process, tmp_path, tally):
    run = tmp_path / "run"
    command = warm_process.start(
        ["train", *run_flags("smolvla", run, steps=STEPS, save_freq=1)], tmp_path / "log_killed"
    )
    wait_until(lambda: len(saved_steps(run)) >= 3, command)
    command.send_signal(signal.SIGKILL)
    command.wait()
    last = saved_steps(run)[-1]
    settings = run / f"checkpoints/{last:06d}/pretrained_model/train_config.json"
    resume = ["train", f"--config_path={settings}", "--resume=true"]
    assert warm_process.run(resume, tmp_path / "log_limited", largest_file=ENOUGH_FOR_LOGS) == 2
    said = (tmp_path / "log_limited").read_text()
    refused = run / f"checkpoints/{last + 1:06d}"
    assert f"craft: {refused} could not be saved (File too large; " in said
    assert "Traceback" not in said
    assert saved_steps(run)[-1] == last
    assert not unfinished_saves(run)
    assert way_on(said) == resume
    assert warm_process.run(way_on(said), tmp_path / "log_end") == 0
    assert_same_run(run, whole)
    tally.add("no room for a checkpoint", "refused, resumed with room: same bits")


def has_small_disks(directory):
    mount = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", directory]
    return shutil.which("unshare") and subprocess.run(mount, capture_output=True).returncode == 0


@pytest.mark.slow  # three runs, one of which imports lerobot first
@pytest.mark.timeout(600)
def test_a_full_disk_ends_the_run_and_spares_the_last_checkpoint(whole, run_flags, warm_process, tmp_path, tally):
    disk, rescued = tmp_path / "disk", tmp_path / "rescued"
    disk.mkdir()
    if not has_small_disks(disk):
        pytest.skip("this machine lets nobody mount a small disk")
    one = sum(path.stat().st_size for path in (whole / "checkpoints/000001").rglob("*"))
    # The disk goes with the process that mounted it: what is on it is copied off before.
    script = 'mount -t tmpfs -o size="$1" tmpfs "$2" && from="$2" to="$3" && shift 3 && "$@"; code=$?; '
    script += 'cp -a "$from" "$to"; exit $code'
    flags = run_flags("smolvla", disk / "run", steps=STEPS, save_freq=1)
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "", str(int(3.5 * one)), disk, rescued]
    command = [*inside, sys.executable, "-m", "lerobot_craft", "train", *flags]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr[-3000:]
    assert re.search(r"000004 could not be saved \(No space left on device; 0\.0\d GB are free there\)", done.stderr)
    assert "Traceback" not in done.stderr
    shutil.copytree(rescued, disk, symlinks=True, dirs_exist_ok=True)
    assert saved_steps(disk / "run") == [1, 2, 3]
    assert not unfinished_saves(disk / "run")
    assert warm_process.run(way_on(done.stderr), tmp_path / "log_end") == 0
    assert_same_run(disk / "run", whole)
    tally.add("no room for a checkpoint", "refused, resumed with room: same bits")
