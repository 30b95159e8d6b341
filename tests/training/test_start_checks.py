"""Nothing is trained that would not be held, or that would be held to something else than the teacher."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest

from lerobot_craft.cli.flags import spelled
from lerobot_craft.cli.train import flag_of
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Reach
from lerobot_craft.training import start_checks
from lerobot_craft.training.anchor_source import open_anchors
from lerobot_craft.training.start_checks import check_start
from tests.training.anchor_contexts import LORA, OPEN_DATASET, make_context, old_dataset, resume, train_a_little

CASES = [
    ("pi0_fast", "hidden", "mse", True),
    ("pi0_fast", "token_ce", "token_ce", False),
    ("pi0_fast", "action", "kl", True),
    ("smolvla", "action", "cosine", True),
    ("pi0", "action", "mse", False),
    ("act", "hidden", "l1", False),
    ("diffusion", "action", "mse", False),
]


@pytest.fixture
def started(teachers, anchor_data, opened_once, monkeypatch, build):
    """Function to a context and its anchors, from a cache or online."""
    monkeypatch.setattr(OPEN_DATASET, opened_once)

    def made(policy_type, retention_mode, *, online=False, settings=(), **more):
        teacher = teachers(policy_type, *settings)
        if online:
            more |= {"teacher": "online", "old_dataset": old_dataset(anchor_data)}
        else:
            more["anchor_cache_dir"] = build(policy_type, policy=settings, retention_mode=retention_mode)
        context = make_context(teacher, anchor_data, retention_mode=retention_mode, **more)
        return context, open_anchors(context)

    return made


@pytest.mark.parametrize(("policy", "retention_mode", "loss_type", "online"), CASES)
def test_a_student_that_is_its_teacher_may_start_and_a_moved_one_may_not(
    policy, retention_mode, loss_type, online, started
):
    context, anchors = started(policy, retention_mode, online=online)
    report = check_start(context, anchors, loss_type)
    assert report.reproduction.holds
    assert report.reproduction.anchors == 18
    assert report.held > 0
    assert report.held + report.free == len(context.trained)
    assert all(parameter.grad is None for parameter in context.policy.parameters())
    assert context.policy.training
    train_a_little(context)
    with pytest.raises(CraftError, match="before the first step the student already differs") as refusal:
        check_start(context, anchors, loss_type)
    assert ("craft cache build" in str(refusal.value)) != online
    assert check_start(resume(context), anchors, loss_type).reproduction is None


@pytest.mark.parametrize("online", [False, True], ids=["cache", "online"])
def test_bfloat16_is_within_its_floor(online, started):
    context, anchors = started("pi0_fast", "hidden", online=online, settings=("--dtype=bfloat16",))
    assert check_start(context, anchors, "mse").reproduction.floor == 1e-3


def test_an_adapter_that_starts_at_zero_may_start_and_another_may_not(started):
    context, anchors = started("pi0_fast", "hidden", online=True, lora=LORA)
    report = check_start(context, anchors, "mse")
    assert report.held > report.free > 0  # those of the last layer are free
    train_a_little(context)
    with pytest.raises(CraftError, match=r"differs from its teacher.*--peft.init_type"):
        check_start(context, anchors, "mse")


def test_what_reaches_nothing_is_refused_in_the_flags_of_training(started):
    context, anchors = started("smolvla", "hidden")
    for name, parameter in context.policy.named_parameters():
        parameter.requires_grad_("lm_expert" in name)
    with pytest.raises(CraftError, match="it would hold nothing") as refusal, spelled(flag_of):
        check_start(context, anchors, "mse")
    assert "--craft.retention_mode=action" in str(refusal.value)


def test_an_adapter_that_claims_too_much_is_found_out_by_a_backward(started, monkeypatch):
    context, anchors = started("pi0_fast", "hidden")
    for name, parameter in context.policy.named_parameters():
        parameter.requires_grad_("lm_head" in name)
    monkeypatch.setattr(start_checks, "check_reach", lambda *_: Reach(["lm_head"], []))
    with pytest.raises(CraftError, match="reaches none of the 1 trained tensors of this pi0_fast"):
        check_start(context, anchors, "mse")


def test_float16_is_refused(started):
    context, anchors = started("smolvla", "action")
    scaled = dataclasses.replace(context, accelerator=SimpleNamespace(mixed_precision="fp16"))
    with pytest.raises(CraftError, match="train in bfloat16"):
        check_start(scaled, anchors, "mse")
    config = copy.copy(context.teacher.config)
    config.device, config.use_amp = "cuda", True  # torch's default there is float16
    on_a_gpu = dataclasses.replace(context, teacher=dataclasses.replace(context.teacher, config=config))
    with pytest.raises(CraftError, match="train in bfloat16"):
        check_start(on_a_gpu, anchors, "mse")
