"""Runs that are ended by Ctrl-C or SIGTERM long before their first regular checkpoint, and saves by the clock."""

import hashlib
import shlex
import signal
import time

import pytest

from tests.faults.runs import assert_same_run, digests, logged_steps, saved_steps, unfinished_saves, wait_until

STEPS = 40  # and save_freq: nothing is saved before the end but what is shown here
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORKERS = {"num_workers": 2, "dataloader_multiprocessing_context": "fork"}  # spawned ones import lerobot first


def printed_resume(log):
    """The flags of the line that the run printed."""
    *_, line = (line for line in log.read_text().splitlines() if line.startswith("craft train "))
    return shlex.split(line)[1:]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGINT, WORKERS),
        pytest.param(signal.SIGTERM, {}, marks=pytest.mark.slow),  # three runs each
        pytest.param(signal.SIGTERM, WORKERS, marks=pytest.mark.slow),
    ],
    ids=["Ctrl-C, data workers", "SIGTERM", "SIGTERM, data workers"],
)
def test_an_interrupted_run_saves_and_prints_how_to_go_on(number, workers, run_flags, warm_process, tmp_path, tally):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def argv(output):
        return ["train", *run_flags("smolvla", output, steps=STEPS, save_freq=STEPS, batch_size=4, **workers)]

    assert warm_process.run(argv(whole), tmp_path / "log") == 0
    command = warm_process.start(argv(broken), tmp_path / "log_broken")
    wait_until(lambda: logged_steps(broken) >= 3, command)
    command.send_signal(number)
    assert command.wait() == EXIT_CODES[number], command.log.read_text()[-3000:]
    said = command.log.read_text()
    assert "Traceback" not in said
    (step,) = saved_steps(broken)
    assert 3 <= step < STEPS
    assert f"{number.name}: stopped after step {step} of {STEPS}. Saved: {broken}/checkpoints/{step:06d}." in said
    assert warm_process.run(printed_resume(command.log), tmp_path / "log_end") == 0
    assert saved_steps(broken) == [STEPS], "what was saved on the way is gone"
    assert_same_run(broken, whole)
    tally.add(f"{number.name} to craft train", "resumed: same bits")


@pytest.mark.timeout(600)
def test_one_of_two_ranks_gets_the_signal_and_both_save_and_stop(run_flags, warm_process, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    argv = ["train", *run_flags("act", run, steps=500, save_freq=500, batch_size=2)]
    main, other = warm_process.start_ranks(argv, log, ranks=2)
    wait_until(lambda: logged_steps(run) >= 3, main)
    other.send_signal(signal.SIGTERM)
    assert [main.wait(), other.wait()] == [143, 143], log.read_text()[-3000:]
    assert len(saved_steps(run)) == 1
    assert "To go on, launched as before:" in log.read_text()


@pytest.mark.timeout(600)
def test_a_second_ctrl_c_ends_it_at_once(run_flags, warm_process, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    argv = ["train", *run_flags("act", run, steps=500, save_freq=500, batch_size=2)]
    command = warm_process.start(argv, log, prepare=("tests.faults.injected:slow_save", 300))
    wait_until(lambda: logged_steps(run) >= 2, command)
    command.send_signal(signal.SIGINT)
    wait_until(lambda: "saving slowly" in log.read_text(), command)
    assert "Ctrl-C (again) ends the run at once" in log.read_text()
    began = time.monotonic()
    command.send_signal(signal.SIGINT)
    assert command.wait() == -signal.SIGINT  # 130 in a shell
    assert time.monotonic() - began < 30
    assert saved_steps(run) == []


@pytest.mark.timeout(600)
def test_saves_by_the_clock_replace_each_other_and_change_nothing(run_flags, craft_train, tmp_path, capfd):
    quiet, busy = tmp_path / "quiet", tmp_path / "busy"

    def train(output, minutes):
        flags = run_flags("smolvla", output, steps=7, save_freq=3, batch_size=4)
        assert craft_train(*flags, f"--craft.save_minutes={minutes}") == 0
        return capfd.readouterr().err.count("Checkpoint policy after step")

    assert train(quiet, minutes=0) == 3
    assert train(busy, minutes=1e-9) == 7, "one after every step"
    assert saved_steps(busy) == saved_steps(quiet) == [3, 6, 7]
    assert not unfinished_saves(busy)
    settings = "pretrained_model/craft_config.json"  # has the flag itself
    mine = {name: digest for name, digest in digests(busy).items() if name != settings}
    assert mine == {name: digest for name, digest in digests(quiet).items() if name != settings}
    assert (busy / "lambda_history.csv").read_text() == (quiet / "lambda_history.csv").read_text()


def test_without_craft_only_lerobots_own_checkpoints_are_written(train_flags, craft_train, tmp_path):
    run = tmp_path / "run"
    assert craft_train(*train_flags("act", run, steps=3, save_freq=2), "--craft.save_minutes=1e-9") == 0
    assert saved_steps(run) == [2, 3]


def test_a_checkpoint_that_somebody_asked_for_is_never_removed(run_flags, craft_train, tmp_path):
    run = tmp_path / "run"
    assert craft_train(*run_flags("act", run, steps=2, save_freq=9, batch_size=2)) == 0  # its last one
    kept = hashlib.sha256((run / "checkpoints/000002/pretrained_model/model.safetensors").read_bytes()).digest()
    more = [f"--output_dir={run}", "--resume=true", "--steps=5", "--craft.save_minutes=1e-9"]
    assert craft_train(*more) == 0
    assert saved_steps(run) == [2, 5]
    assert hashlib.sha256((run / "checkpoints/000002/pretrained_model/model.safetensors").read_bytes()).digest() == kept
