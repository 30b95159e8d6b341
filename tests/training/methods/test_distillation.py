"""Learning without forgetting: the teacher's outputs on the new data, with a weight that stays."""

from types import SimpleNamespace

import pytest
import torch

from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.core import Dual
from lerobot_craft.training.methods.constrained import Constrained
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


def test_the_rule_is_its_own_and_the_settings_stay_as_they_were_given(context_of):
    given = context_of(
        retention_mode="hidden",
        lambda_per_task=True,
        lambda_lr=0.5,
        retention_freq=7,
        use_grad_projection=True,
        task_max_norm=2.0,
    )
    method = started(given)
    assert method.context is given
    assert (method.every, method.per_task) == (1, False), "so its history has no column per task"
    assert method.settled.modes == ("action",), "by which records name the unit of the drift"
    fixed = {"initial_lambda": WEIGHT, "lambda_min": WEIGHT, "lambda_max": WEIGHT}
    assert method.dual(given.config) == Dual(lambda_lr=0.0, **fixed)
    assert method.surgery(given.config, 3.0).is_sum
    assert method.surgery(given.config, 3.0).merged_max_norm == 3.0


def test_an_estimate_has_anchors_at_every_step_and_only_actions(context_of):
    context = context_of(retention_freq=7, retention_mode="hidden", per_token=True, anchor_batch_size=5)
    cfg = SimpleNamespace(policy=context.teacher.config, batch_size=3)
    found = LearningWithoutForgetting.parts(cfg, context.config, context.policy)
    assert (found.rows, found.every, found.anchoring.rows) == (3, 1, 5)
    assert found.anchoring.retained == Action()
    assert Constrained.parts(cfg, context.config, context.policy).every == 7
