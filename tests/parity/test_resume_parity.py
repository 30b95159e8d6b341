"""`craft train` without CRaFT goes on exactly where it was ended, which lerobot-train 0.6.1 does not."""

import signal

import pytest

from tests.faults.runs import digests, saved_steps, wait_until

# 36 frames in batches of 8: an epoch has 5 steps. Lerobot's own resume takes the first epoch's order again after it.
MOMENTS = {"middle of the first epoch": 3, "its end": 5, "middle of the second": 7}
STEPS = 13


@pytest.mark.slow  # three runs
@pytest.mark.timeout(600)
@pytest.mark.parametrize("killed_at", MOMENTS.values(), ids=MOMENTS)
def test_a_resumed_run_without_craft_is_never_killed(killed_at, train_flags, warm_process, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def flags(output):
        return ["train", *train_flags("smolvla", output, steps=STEPS, batch_size=8, save_freq=1)]

    assert warm_process.run(flags(whole), tmp_path / "log") == 0
    command = warm_process.start(flags(broken), tmp_path / "log_broken")
    wait_until(lambda: saved_steps(broken)[-1:] >= [killed_at], command)
    command.send_signal(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    settings = broken / f"checkpoints/{killed_at:06d}/pretrained_model/train_config.json"
    assert warm_process.run(["train", f"--config_path={settings}", "--resume=true"], tmp_path / "log_end") == 0
    assert digests(broken) == digests(whole)
