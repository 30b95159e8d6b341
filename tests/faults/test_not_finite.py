"""NaN and infinity, wherever they come from: a sentence, the last good checkpoint, and a run that goes on from it."""

import pytest
import torch

from lerobot_craft.anchors.manifest import shard_name
from tests.anchors.test_lies import rewrite_shard
from tests.faults.runs import assert_same_run, resume_flags, saved_steps

STEPS = 6
# Where -> the call (from 1) that is poisoned, the step that is not taken, and the gradient that the sentence names.
# Anchors are visited on every second step; the first two drifts belong to the checks before the first step.
PLACES = {"task loss": (5, 5, "task"), "gradient": (5, 5, "task"), "retention loss": (3, 6, "retention")}


def flags(run_flags, output):
    return ["train", *run_flags("smolvla", output, steps=STEPS, save_freq=2, batch_size=4)]


@pytest.fixture
def whole(run_flags, warm_process, tmp_path):
    assert warm_process.run(flags(run_flags, tmp_path / "whole"), tmp_path / "log") == 0
    return tmp_path / "whole"


def stop_and_go_on(where, value, run_flags, warm_process, whole, tmp_path):
    call, step, gradient = PLACES[where]
    run, log = tmp_path / f"{where} {value}", tmp_path / "log_poisoned"
    prepare = ("tests.faults.injected:not_finite", where, value, call)
    assert warm_process.run(flags(run_flags, run), log, prepare=prepare) == 2, log.read_text()[-2000:]
    *_, said = log.read_text().splitlines()
    assert f"craft: at step {step} the {gradient} gradient is not finite" in said
    assert f"the last good checkpoint is {run / 'checkpoints' / '000004'}; go on from it with" in said
    assert "Traceback" not in log.read_text()
    assert saved_steps(run) == [2, 4]
    assert warm_process.run(["train", *resume_flags(run)], log) == 0
    assert_same_run(run, whole)


@pytest.mark.slow  # two runs for each; the short form is in test_bad_input.py
@pytest.mark.timeout(900)
def test_a_poisoned_step_is_not_taken_wherever_it_is(run_flags, warm_process, whole, tmp_path, tally):
    for where in PLACES:
        for value in ("nan", "inf"):
            stop_and_go_on(where, value, run_flags, warm_process, whole, tmp_path)
            tally.add("NaN or infinity in training", "step refused, resumed: same bits")


@pytest.mark.parametrize("value", [float("nan"), pytest.param(float("inf"), marks=pytest.mark.slow)])  # a run's start
def test_a_cache_that_holds_no_numbers_is_refused_before_the_first_step(
    value, train_flags, craft_train, build, tmp_path, capfd, tally
):
    cache = build("smolvla", retention_mode="action")

    def poison(tensors):
        tensors["target"][1, 0, 0, 0] = value

    rewrite_shard(cache, poison)
    flags = ["--craft.enabled=true", "--craft.retention_mode=action", f"--craft.anchor_cache_dir={cache}"]
    assert craft_train(*train_flags("smolvla", tmp_path / "run"), *flags) == 2
    assert "row 1 holds NaN or infinity in 'target'" in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "run").exists()
    tally.add("NaN or infinity in a cache", "refused before the first step")


def test_a_teacher_that_answers_nan_builds_nothing(build, teachers, tmp_path, monkeypatch):
    from lerobot_craft.anchors.manifest import finished_shards
    from lerobot_craft.errors import CraftError

    parameter = next(p for name, p in teachers("act").policy.named_parameters() if "action_head.weight" in name)
    kept = parameter.detach().clone()
    try:
        with torch.no_grad():
            parameter.fill_(float("nan"))
        with pytest.raises(CraftError, match=r"the teacher answers NaN or infinity .* of local/old: look at"):
            build("act", retention_mode="action")
    finally:
        with torch.no_grad():
            parameter.copy_(kept)
    assert not (tmp_path / "cache" / "manifest.json").exists()
    assert finished_shards(tmp_path / "cache") == {}, f"not even {shard_name(0)}"
