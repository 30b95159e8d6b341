"""The gradient that is added is the penalty's own."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.training.methods.l2sp import L2SP, add_pull, require_plain_gradients


def weights(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("weighted", [False, True])
def test_gradient_and_value_are_those_of_the_penalty(weighted):
    parameters, start = weights((3, 2), (5,)), [torch.zeros(3, 2).double(), torch.ones(5).double()]
    fisher = [torch.rand(p.shape, dtype=torch.float64) for p in parameters] if weighted else None
    importance = fisher or [torch.ones_like(p) for p in parameters]
    terms = zip(parameters, start, importance, strict=True)
    expected = 0.3 / 2 * sum((f * (p - s) ** 2).sum() for p, s, f in terms)
    gradients = torch.autograd.grad(expected, parameters)
    for p in parameters:
        p.grad = torch.full_like(p, 0.7)
    value = add_pull(parameters, start, 0.3, fisher)
    torch.testing.assert_close(value, expected.detach())
    for p, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient + 0.7)


def test_where_nothing_has_moved_the_task_gradient_keeps_its_bits():
    parameters = weights((4,), dtype=torch.float32)
    parameters[0].grad = torch.randn(4)
    before = parameters[0].grad.clone()
    assert add_pull(parameters, [p.detach().clone() for p in parameters], 10.0) == 0
    assert torch.equal(parameters[0].grad, before)


def test_a_parameter_that_the_step_did_not_reach_is_pulled_only_if_it_has_moved():
    moved, still = weights((2,), (2,))
    add_pull([moved, still], [moved.detach() - 1, still.detach().clone()], 0.5)
    torch.testing.assert_close(moved.grad, torch.full((2,), 0.5, dtype=torch.float64))
    assert still.grad is None


def test_bfloat16_weights_are_subtracted_and_summed_in_float32():
    parameters = [nn.Parameter(torch.full((4096,), 1.0, dtype=torch.bfloat16))]
    start = [torch.full((4096,), -(2**-8), dtype=torch.bfloat16)]  # the difference needs one bit more
    parameters[0].grad = torch.zeros(4096, dtype=torch.bfloat16)
    assert add_pull(parameters, start, 2.0).item() == 4096 * (1 + 2**-8) ** 2
    assert parameters[0].grad.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shard", "scaler", "words"),
    [(True, None, "without --craft.shard"), (False, object(), "bfloat16 or full precision")],
)
def test_ways_of_running_without_plain_gradients_are_refused(module_context, shard, scaler, words):
    context = module_context(nn.Linear(1, 1), method="l2sp", shard=shard)
    context = dataclasses.replace(context, accelerator=SimpleNamespace(scaler=scaler))  # there is none on a CPU
    with pytest.raises(CraftError, match=words):
        L2SP().start(context)


def test_one_process_in_full_precision_is_accepted(module_context):
    require_plain_gradients(module_context(nn.Linear(1, 1), method="l2sp"))
