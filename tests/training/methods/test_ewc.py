"""EWC against its formula, on a real policy."""

import math

import pytest
import torch

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.training.methods.demonstrations import old_demonstrations
from lerobot_craft.training.methods.ewc import EWC, FISHER, fisher_diagonal

SAMPLES = 3


@pytest.fixture
def context(policy_context):
    return policy_context(method="ewc", ewc_samples=SAMPLES, ewc_lambda=7.0)


def started(context):
    method = EWC()
    method.start(context)
    return method


def some_loss(policy):
    return sum((parameter * 0.5).sum() for parameter in policy.parameters())


def move(policy):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_fisher_is_the_mean_of_squared_gradients_of_single_frames(context):
    frames = old_demonstrations(context, SAMPLES)
    expected = [torch.zeros_like(p) for p in context.trained]
    policy = context.policy.eval()
    for number, raw in enumerate(frames.batches(1)):
        torch.manual_seed(context.seed + number)
        loss, _ = policy.forward(policy_batch(raw, frames.cameras, context.teacher.preprocessor))
        policy.zero_grad()
        loss.backward()
        for total, parameter in zip(expected, context.trained, strict=True):
            if parameter.grad is not None:
                total += parameter.grad**2 / SAMPLES
    policy.zero_grad()
    fisher = fisher_diagonal(context, frames)
    for found, total in zip(fisher, expected, strict=True):
        torch.testing.assert_close(found, total, rtol=1e-5, atol=0)
    assert sum(total.sum() for total in fisher) > 0
    assert all(parameter.grad is None for parameter in context.trained)


def test_the_gradient_is_that_of_the_loss_with_the_penalty(context):
    method = started(context)
    fisher, start = method._fisher, [p.detach().clone() for p in context.trained]
    move(context.policy)
    terms = zip(context.trained, start, fisher, strict=True)
    penalty = 7.0 / 2 * sum((f * (p - s) ** 2).sum() for p, s, f in terms)
    expected = torch.autograd.grad(some_loss(context.policy) + penalty, context.trained)
    method.backward(some_loss(context.policy))
    for parameter, gradient in zip(context.trained, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
    assert method.metrics()["penalty"] == pytest.approx(penalty.item(), rel=1e-4)
    assert penalty > 0


def test_a_resumed_run_needs_no_old_data_and_has_the_same_bits(context, policy_context):
    method = started(context)
    resumed_context = policy_context(method="ewc", old=None, resumed=True)
    move(resumed_context.policy)  # a resumed policy is not the one that fine-tuning started from
    resumed = started(resumed_context)
    resumed.load_state_dict(method.state_dict())
    for name in ("_fisher", "_start"):
        for a, b in zip(getattr(method, name), getattr(resumed, name), strict=True):
            assert torch.equal(a, b)


def test_another_fisher_is_refused(context, policy_context, tmp_path):
    state = started(context).state_dict()
    data = bytearray((tmp_path / FISHER).read_bytes())
    data[-1] ^= 1
    (tmp_path / FISHER).write_bytes(data)
    resumed = started(policy_context(method="ewc", resumed=True))
    with pytest.raises(CraftError, match=FISHER):
        resumed.load_state_dict(state)


def test_it_costs_two_copies(context):
    size = sum(parameter.nbytes for parameter in context.trained)
    assert [cost.bytes for cost in started(context).costs()] == [size, size]


def test_gradients_that_are_not_finite_are_refused(context):
    with torch.no_grad():
        context.trained[-1].fill_(math.nan)
    with pytest.raises(CraftError, match="not finite"):
        started(context)


def test_ranks_share_the_frames_and_find_the_same(context):
    """Two ranks one after the other: what each adds is what one rank alone finds in all."""
    frames = old_demonstrations(context, SAMPLES)
    whole = fisher_diagonal(context, frames)
    parts = []
    for rank in range(2):
        settings = [getattr(context, name) for name in vars(context)]
        settings[list(vars(context)).index("accelerator")] = _Rank(context.accelerator, rank)
        parts.append(fisher_diagonal(type(context)(*settings), frames))
    for total, a, b in zip(whole, *parts, strict=True):
        torch.testing.assert_close(a + b, total)


class _Rank:
    """An accelerator that says it is one of two; what they would sum stays apart."""

    num_processes = 2

    def __init__(self, accelerator, rank):
        self.process_index, self.is_main_process = rank, rank == 0
        self.autocast, self.device = accelerator.autocast, accelerator.device

    def reduce(self, tensor, reduction):
        assert reduction == "sum"
        return tensor
