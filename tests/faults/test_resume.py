"""Kill at any moment, resume, and have the run that was never killed, to the bit; test_kills.py kills more often."""

import pytest

from tests.faults.runs import assert_same_run, kill_when, logged_steps, resume_flags

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
