"""N micro-batches are the step of one batch N times as large, with anchors, K and multipliers of each task."""

import pytest

from lerobot_craft.training.journal import read_history
from tests.distributed.conftest import ANCHORS, SAMPLES
from tests.distributed.test_train import (
    BUDGET,
    K_STEP,
    OLD_FRAMES,
    RUNS,
    STEPS,
    assert_same_run,
    assert_worth_comparing,
)


def divided(into: int, ranks: int = 1) -> dict[str, object]:
    parts = into * ranks
    return {"batch_size": SAMPLES // parts, "craft__anchor_batch_size": ANCHORS // parts, "craft__accumulate": into}


@pytest.mark.timeout(300)
def test_two_micro_batches_are_one_batch_twice_as_large(train):
    """The short one: a step without anchors, and two with them; gradients conflict and are projected."""
    settings = {**BUDGET, **K_STEP, **OLD_FRAMES, "craft__probe_anchors": 2, "steps": 4}
    one = train("smolvla", 1, **settings)
    two = train("smolvla", 1, "divided", **settings, **divided(2))
    assert_same_run(two, one)
    assert any(row["conflict"] for row in read_history(two.output))
    assert two.metrics[-1]["lambda"] > two.metrics[1]["lambda"]


# Where gradients are added, nothing is held apart; `lwf` has anchors of the new task; `er` joins frames to a batch.
OTHERS = {
    "added": {**BUDGET, **K_STEP, "craft__use_grad_projection": "false"},
    "hidden and action": {
        **BUDGET,
        **K_STEP,
        "craft__retention_mode": "hidden+action",
        "policy__train_expert_only": "false",
    },
    "online": {**K_STEP, "craft__teacher": "online"},
    **{name: {"craft__method": name} for name in ("naive", "er", "l2sp", "ewc", "lwf", "freeze")},
}
OF_METHOD = {
    "craft__replay_frames": 12,
    "craft__replay_ratio": 0.5,
    "craft__ewc_samples": 6,
    "craft__freeze": "readout",
}


@pytest.mark.slow  # two runs each
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OTHERS)
def test_every_method_accumulates(name, train):
    settings = {**OLD_FRAMES, **OF_METHOD, "steps": 4, **OTHERS[name]}
    one = train("smolvla", 1, **settings)
    assert_same_run(train("smolvla", 1, "divided", **settings, **divided(2)), one)


@pytest.mark.slow  # two runs each, of more than an epoch
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", RUNS)
def test_four_micro_batches_are_one_batch_four_times_as_large(name, train):
    policy_type, settings = RUNS[name]
    one = train(policy_type, 1, **BUDGET, **settings, steps=STEPS)
    four = train(policy_type, 1, "divided", **BUDGET, **settings, steps=STEPS, **divided(4))
    assert_same_run(four, one)
    assert_worth_comparing(four)


@pytest.mark.slow  # two runs each, one of them of two processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shard", ["false", "true"], ids=["DDP", "FSDP2"])
def test_ranks_accumulate_too(shard, train):
    settings = {**BUDGET, **K_STEP, **OLD_FRAMES, "steps": 4}
    one = train("smolvla", 1, **settings)
    two = train("smolvla", 2, **settings, **divided(2, ranks=2), craft__shard=shard)
    assert_same_run(two, one)
    assert any(row["conflict"] for row in read_history(two.output))
