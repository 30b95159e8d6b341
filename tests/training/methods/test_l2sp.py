"""L2-SP against its formula, and a resumed run against one that was never interrupted."""

import copy

import pytest
import torch
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.training.methods.kept_tensors import START_WEIGHTS
from lerobot_craft.training.methods.l2sp import L2SP


def student():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def task_loss(policy, step):
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    return (policy(inputs) - 1).square().mean()


def train(method, policy, optimizer, steps):
    for step in steps:
        method.backward(task_loss(policy, step))
        method.clip(policy.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()


def started(context, method=L2SP):
    running = method()
    running.start(context)
    return running


def test_the_gradient_is_that_of_the_loss_with_the_penalty(module_context):
    policy = student()
    origin = copy.deepcopy(policy)
    policy[0].bias.requires_grad_(False)
    method = started(module_context(policy, method="l2sp", l2sp_alpha=0.3))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    trained = [(p, s) for p, s in zip(policy.parameters(), origin.parameters(), strict=True) if p.requires_grad]
    penalty = 0.15 * sum((p - s).square().sum() for p, s in trained)
    expected = torch.autograd.grad(task_loss(policy, 0) + penalty, [p for p, _ in trained])
    method.backward(task_loss(policy, 0))
    for (parameter, _), gradient in zip(trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    assert policy[0].bias.grad is None
    measured = method.metrics()
    assert measured["penalty"] == pytest.approx(penalty.item())
    assert measured["retention_s"] > 0


def test_it_holds_the_weights_closer_than_plain_training(module_context, tmp_path):
    distances = []
    for alpha in (1e-9, 10.0):
        policy = student()
        method = started(module_context(policy, method="l2sp", l2sp_alpha=alpha))
        train(method, policy, torch.optim.SGD(policy.parameters(), lr=0.05), range(50))
        distances.append(
            sum((p - s).square().sum() for p, s in zip(policy.parameters(), student().parameters(), strict=True))
        )
    assert distances[1] < 0.1 * distances[0]


def test_a_resumed_run_ends_with_the_same_bits(module_context):
    policies = [student(), student()]
    for policy, parts in zip(policies, [[range(8)], [range(5), range(5, 8)]], strict=True):
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
        state = None
        for steps in parts:
            context = module_context(policy, method="l2sp", l2sp_alpha=0.5, resumed=state is not None)
            method = started(context)
            if state is not None:
                method.load_state_dict(state)
            train(method, policy, optimizer, steps)
            state = method.state_dict()
    for a, b in zip(policies[0].parameters(), policies[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_another_runs_weights_are_refused(module_context, tmp_path):
    policy = student()
    state = started(module_context(policy, method="l2sp")).state_dict()
    with torch.no_grad():
        policy[0].weight.add_(1)
    started(module_context(policy, method="l2sp"))  # a fresh run in the same place writes its own
    resumed = started(module_context(policy, method="l2sp", resumed=True))
    with pytest.raises(CraftError, match="not the file that this run was started with"):
        resumed.load_state_dict(state)
    assert (tmp_path / START_WEIGHTS).is_file()


def test_it_costs_one_copy_of_what_is_trained(module_context):
    policy = student()
    policy[0].requires_grad_(False)
    (cost,) = started(module_context(policy, method="l2sp")).costs()
    assert cost.bytes == 4 * (4 * 2 + 2)


def test_before_the_first_step_there_is_no_penalty_to_report(module_context):
    assert started(module_context(student(), method="l2sp")).metrics() == {}
