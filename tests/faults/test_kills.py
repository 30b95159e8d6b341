"""Runs that are ended from outside, again and again, and resumed by the line that craft itself prints."""

import random
import shlex
import signal
import time

import pytest

from tests.faults.runs import assert_same_run, resume_flags, saved_steps, unfinished_saves, wait_until

KILLS = 10
STEPS = 30


@pytest.fixture
def printed_resume(craft_train, capfd):
    """Function that gives the line to go on with, as a person gets it who types the first command again."""

    def line(flags):
        assert craft_train(*flags) == 2
        *_, last = capfd.readouterr().err.splitlines()
        craft, *argv = shlex.split(last)
        assert craft == "craft"
        return argv

    return line


def kill(command, run, rng):
    """Wait for a new checkpoint; then SIGKILL, half of the time at a random moment, half of the time in a save."""
    before = saved_steps(run)
    wait_until(lambda: saved_steps(run) > before, command)
    if rng.random() < 0.5:
        time.sleep(rng.uniform(0, 0.5))
    else:
        wait_until(lambda: unfinished_saves(run), command)
        time.sleep(rng.uniform(0, 0.02))
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL, "it ended by itself: more steps are needed"


@pytest.mark.slow  # a dozen runs
@pytest.mark.timeout(1200)
def test_killed_ten_times_is_never_killed(run_flags, warm_process, printed_resume, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert warm_process.run(["train", *run_flags("smolvla", whole, steps=STEPS, save_freq=1)], tmp_path / "log") == 0
    first = run_flags("smolvla", broken, steps=STEPS, save_freq=1)
    argv, rng, reached, torn = ["train", *first], random.Random(0), [], 0  # noqa: S311  # noqa: S311  # the same moments each time
    for number in range(KILLS):
        kill(warm_process.start(argv, tmp_path / f"log_{number}"), broken, rng)
        reached.append(saved_steps(broken)[-1])
        torn += bool(unfinished_saves(broken))
        argv = printed_resume(first)
        assert f"checkpoints/{reached[-1]:06d}/" in argv[1]
    assert reached == sorted(set(reached)), "every run got further"
    assert torn >= 2, "kills in the middle of a save"
    assert warm_process.run(argv, tmp_path / "log_end") == 0
    assert "which an interrupted save had left" in "".join(path.read_text() for path in tmp_path.glob("log_*"))
    assert not unfinished_saves(broken)
    assert saved_steps(broken) == saved_steps(whole)
    assert_same_run(broken, whole)


@pytest.mark.slow  # three runs, each with workers to start
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed_at", [3, 5])  # in the middle of an epoch, and at the end of the first
def test_a_resumed_run_with_data_workers_is_never_killed(killed_at, run_flags, warm_process, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def flags(output):
        workers = {"num_workers": 2, "dataloader_multiprocessing_context": "fork"}  # spawned ones import lerobot first
        return ["train", *run_flags("smolvla", output, steps=12, save_freq=1, **workers)]

    assert warm_process.run(flags(whole), tmp_path / "log") == 0
    command = warm_process.start(flags(broken), tmp_path / "log_broken")
    wait_until(lambda: (broken / "checkpoints" / f"{killed_at:06d}").exists(), command)
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    settings = broken / f"checkpoints/{killed_at:06d}/pretrained_model/train_config.json"
    assert warm_process.run(["train", f"--config_path={settings}", "--resume=true"], tmp_path / "log_end") == 0
    assert_same_run(broken, whole)


@pytest.mark.slow  # three runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_an_interrupted_run_says_so_by_its_exit_code_and_goes_on(number, exit_code, run_flags, warm_process, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def flags(output):
        return ["train", *run_flags("smolvla", output, steps=12, save_freq=2)]

    assert warm_process.run(flags(whole), tmp_path / "log") == 0
    command = warm_process.start(flags(broken), tmp_path / "log_broken")
    wait_until(lambda: saved_steps(broken), command)
    time.sleep(0.2)
    command.send_signal(number)
    assert command.wait() == exit_code
    assert "Traceback" not in command.log.read_text()
    assert not unfinished_saves(broken)
    assert warm_process.run(["train", *resume_flags(broken)], tmp_path / "log_end") == 0
    assert_same_run(broken, whole)
