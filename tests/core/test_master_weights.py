"""Float32 copies of bfloat16 weights take the optimizer's steps; the weights are the copies, rounded."""

import copy

import pytest
import torch
from torch import nn

from lerobot_craft.core.parameters import MasterWeights

LR = 2.5e-5


def policy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).bfloat16()
    model[1].float()  # as lerobot keeps some
    return model


def gradients(model, step):
    torch.manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


def trained(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_weights_are_those_of_a_float32_run_rounded(kind):
    model = policy()
    exact = copy.deepcopy(model).float()
    optimizer = kind(model.parameters(), lr=LR)
    MasterWeights(optimizer, model.named_parameters())
    reference = kind(exact.parameters(), lr=LR)
    for step in range(5):
        gradients(model, step)
        for p, q in zip(model.parameters(), exact.parameters(), strict=True):
            q.grad = p.grad.float()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    for p, q in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(p, q.to(p.dtype))
        assert p.grad is None


def test_updates_that_bfloat16_loses_add_up():
    lost, kept = policy(), policy()
    start = [p.detach().clone() for p in lost.parameters()]
    plain, held = (torch.optim.AdamW(m.parameters(), lr=LR, weight_decay=0.0) for m in (lost, kept))
    MasterWeights(held, kept.named_parameters())
    without, with_copies = trained(lost, plain, 50), trained(kept, held, 50)

    def moved(weights):
        rounded = [(w, s) for w, s in zip(weights, start, strict=True) if w.dtype == torch.bfloat16]
        return sum(int((w != s).sum()) for w, s in rounded) / sum(w.numel() for w, _ in rounded)

    assert moved(without) < 0.5 * moved(with_copies)


def test_a_parameter_without_a_gradient_stays():
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    MasterWeights(optimizer, model.named_parameters())
    start = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p, s) for p, s in zip(model.parameters(), start, strict=True))


def test_only_bfloat16_weights_that_are_trained_have_a_copy():
    model = policy()
    model[2].requires_grad_(False)
    masters = MasterWeights(torch.optim.SGD([*model[0].parameters(), *model[1].parameters()]), model.named_parameters())
    assert list(masters.copies) == ["0.weight", "0.bias"]
    assert masters.nbytes == 4 * (8 * 16 + 16)


def test_saved_and_loaded_they_go_on_to_the_bit():
    model = policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    masters = MasterWeights(optimizer, model.named_parameters())
    trained(model, optimizer, 3)
    saved, state = {n: c.detach().clone() for n, c in masters.copies.items()}, copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    expected = trained(model, optimizer, 3, first=3)

    again = policy()
    again.load_state_dict(weights)
    resumed = torch.optim.AdamW(again.parameters(), lr=LR)
    MasterWeights(resumed, again.named_parameters()).load(saved)
    resumed.load_state_dict(state)
    assert all(torch.equal(p, q) for p, q in zip(trained(again, resumed, 3, first=3), expected, strict=True))
