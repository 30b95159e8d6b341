"""A clock that goes backwards changes nothing; a seed that changes is refused."""

import json

import pytest

from tests.faults.runs import assert_same_run, resume_flags

DAY = 86_400
STEPS = 4


@pytest.mark.slow  # four runs; another seed is refused in test_bad_input.py too
@pytest.mark.timeout(300)
def test_a_clock_that_goes_backwards_changes_nothing_and_another_seed_is_refused(
    run_flags, warm_process, tmp_path, tally
):
    whole, run = tmp_path / "whole", tmp_path / "run"

    def flags(output, steps):
        return ["train", *run_flags("smolvla", output, steps=steps, save_freq=2, batch_size=4)]

    def back(days):
        return ("tests.faults.injected:clock_goes_back", days * DAY)

    assert warm_process.run(flags(whole, STEPS), tmp_path / "log") == 0
    kill = ("tests.faults.injected:kill_around_step", 3, True)
    assert warm_process.run(flags(run, STEPS), tmp_path / "log_killed", prepare=kill) < 0
    seeded = [*resume_flags(run), "--seed=8"]
    assert warm_process.run(["train", *seeded], tmp_path / "log_seed") == 2
    said = (tmp_path / "log_seed").read_text().splitlines()[-1]
    assert said.startswith("craft: the run was begun with --seed=7 and cannot go on with --seed=8")
    assert warm_process.run(["train", *resume_flags(run)], tmp_path / "log_end", prepare=back(400)) == 0
    assert_same_run(run, whole)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == STEPS
    tally.add("clock a year back, and running backwards", "resumed: same bits")
    tally.add("resumed with another seed", "refused")
