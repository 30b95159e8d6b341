"""Learning without forgetting: the teacher's outputs on the new data, with a weight that stays."""

import pytest
import torch

from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.training.methods.distillation import LearningWithoutForgetting
from tests.anchor_fixtures import NEW_TASKS
from tests.training.anchor_contexts import OPEN_DATASET, make_context, old_dataset, train_a_little

WEIGHT = 20.0  # beyond lambda_max, which is not for it


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def context_of(teachers, anchor_data, opened_once, home, monkeypatch):
    monkeypatch.setattr(OPEN_DATASET, opened_once)
    monkeypatch.setenv("CRAFT_HOME", str(home))

    def made(policy_type="act", **craft):
        craft = {"method": "lwf", "lwf_lambda": WEIGHT, "old_dataset": old_dataset(anchor_data), **craft}
        context = make_context(teachers(policy_type), anchor_data, **craft)
        context.train.optimizer = context.teacher.config.get_optimizer_preset()
        return context

    return made


def started(context):
    method = LearningWithoutForgetting()
    method.start(context)
    return method


def test_the_anchors_are_new_data_and_a_cache_that_was_given_is_not_read(context_of, build, home):
    given = build("act", retention_mode="hidden", per_token=True)
    method = started(context_of(anchor_cache_dir=given, per_token=True, old_instructions="wave"))
    assert list(method.anchors.tasks) == NEW_TASKS
    assert method.anchors.retained.mode == "action"
    assert method.anchors.directory.is_relative_to(home)
    (origin,) = Manifest.load(method.anchors.directory).datasets
    assert origin.repo_id == "local/new"


def test_every_step_adds_the_distillation_with_the_same_weight(context_of):
    # Far below its budget a multiplier would fall; it may not.
    method = started(context_of(anchor_batch_size=6, epsilon_start=50.0, epsilon_end=50.0, lambda_lr=0.5))
    context = method.context
    context.policy.eval()
    train_a_little(context, scale=1.001)
    for _ in range(3):  # at every step, whatever --craft.retention_freq says
        loss = 1e-3 * sum((parameter - 1).square().sum() for parameter in context.trained)
        task = torch.autograd.grad(loss, context.trained, retain_graph=True)
        (part,) = method._drift()
        distillation = torch.autograd.grad(part.drift().per_sample.mean(), context.trained, allow_unused=True)
        method.backward(loss)
        values = method.metrics()
        assert values["lambda"] == WEIGHT
        assert values["retention_loss"] > 0
        assert values["conflict"] is False
        assert not [key for key in values if key.startswith(("lambda/", "retention_loss/"))]
        method.advance()
    wanted = torch.cat(
        [(t if d is None else t + WEIGHT * d).flatten() for t, d in zip(task, distillation, strict=True)]
    )
    found = torch.cat([parameter.grad.flatten() for parameter in context.trained])
    assert torch.nn.functional.cosine_similarity(wanted, found, dim=0) > 0.999


def test_flags_of_the_constraint_freeze_no_readout_here(context_of, build):
    """Methods are compared by changing --craft.method alone: the rest of the line then speaks of hidden states."""
    given = build("act", retention_mode="hidden", per_token=True)
    for craft in ({"per_token": True}, {"anchor_cache_dir": given}):
        context = context_of(**craft)
        LearningWithoutForgetting().freeze(context.policy, context.config, context.teacher.config)
        assert all(parameter.requires_grad for parameter in context.policy.parameters())
    context = context_of(freeze_readout=True)
    LearningWithoutForgetting().freeze(context.policy, context.config, context.teacher.config)
    assert not all(parameter.requires_grad for parameter in context.policy.parameters()), "who asks for it gets it"


def test_the_config_that_is_logged_says_what_was_settled(context_of):
    config = started(context_of(lambda_per_task=True)).context.config
    assert (config.method, config.retention_mode, config.retention_freq) == ("lwf", "action", 1)
    assert (config.initial_lambda, config.lambda_lr, config.lambda_per_task) == (WEIGHT, 0.0, False)
