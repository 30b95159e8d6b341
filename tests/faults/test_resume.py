"""Kill at any moment, resume, and have the run that was never killed, to the bit; test_kills.py kills more often."""

import signal

import pytest

from tests.faults.runs import assert_same_run, kill_when, logged_steps, resume_flags, saved_steps, wait_until

STEPS = 11


# 36 frames in batches of 8: an epoch has 5 steps. Step 7 is in the middle of the second one, step 5 at its start.
@pytest.mark.parametrize(
    ("save_freq", "killed_after"),
    [(7, 8), pytest.param(5, 5, marks=pytest.mark.slow)],  # a process that imports lerobot
)
def test_killed_and_resumed_is_never_killed(save_freq, killed_after, run_flags, craft_train, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert craft_train(*run_flags("smolvla", whole, steps=STEPS, save_freq=save_freq)) == 0
    kill_when(
        lambda: logged_steps(broken) >= killed_after and (broken / "checkpoints" / "last").exists(),
        run_flags("smolvla", broken, steps=STEPS, save_freq=save_freq),
        tmp_path / "log",
    )
    assert logged_steps(broken) < STEPS, "it was killed too late to show anything"
    assert craft_train(*resume_flags(broken)) == 0
    assert_same_run(broken, whole)


@pytest.mark.timeout(600)
def test_stopped_inside_an_accumulation(run_flags, warm_process, tmp_path):
    """A kill throws the half of a step away; a signal that can wait lets the step come to its end, and saves it."""
    settings = {"steps": 6, "save_freq": 3, "batch_size": 4, "craft__accumulate": 2}
    fault = "tests.faults.injected:signal_in_forward"

    def argv(output):
        return ["train", *run_flags("smolvla", output, **settings)]

    whole = tmp_path / "whole"
    assert warm_process.run(argv(whole), tmp_path / "log") == 0
    for number, exit_code, taken in ((signal.SIGKILL, -signal.SIGKILL, 4), (signal.SIGTERM, 128 + signal.SIGTERM, 5)):
        broken, log = tmp_path / f"broken_{number}", tmp_path / f"log_{number}"
        second_of_step_5 = 2 * 4 + 2
        assert warm_process.run(argv(broken), log, prepare=(fault, number, second_of_step_5)) == exit_code
        assert logged_steps(broken) == taken
        assert saved_steps(broken)[-1] == (3 if number == signal.SIGKILL else 5)
        assert warm_process.run(["train", *resume_flags(broken)], log) == 0, log.read_text()[-3000:]
        assert_same_run(broken, whole)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [[], ["--resume=true"]], ids=["same command", "with --resume"])
def test_killed_before_the_first_checkpoint_is_started_again(more, run_flags, warm_process, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def argv(output):
        return ["train", *run_flags("smolvla", output, steps=STEPS, save_freq=STEPS, batch_size=4)]

    assert warm_process.run(argv(whole), tmp_path / "log") == 0
    command = warm_process.start(argv(broken), tmp_path / "log_killed")
    wait_until(lambda: logged_steps(broken) >= 2, command)
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert (broken / "metrics.jsonl").exists()
    assert not (broken / "checkpoints" / "last").exists()
    log = tmp_path / "log_again"
    assert warm_process.run([*argv(broken), *more], log) == 0, log.read_text()[-3000:]
    assert_same_run(broken, whole)


def test_a_run_is_never_resumed_without_its_constraint(run_flags, craft_train, tmp_path, capfd):
    run = tmp_path / "run"
    assert craft_train(*run_flags("act", run, steps=2, save_freq=1, batch_size=2)) == 0
    (run / "checkpoints/000002/pretrained_model/craft_config.json").unlink()
    assert craft_train(*resume_flags(run), "--steps=3") == 2
    said = capfd.readouterr().err
    assert "craft_config.json is missing, and craft_state.json says" in said
    assert "000001/pretrained_model/train_config.json" in said.splitlines()[-1]
    assert not (run / "checkpoints/000003").exists()
