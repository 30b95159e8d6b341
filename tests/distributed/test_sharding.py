"""A policy spread over ranks (FSDP2) takes the steps of one process that has the whole of it."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from lerobot_craft.core import AnchorDrift, Dual, Multipliers, RetentionStep, Surgery, drift
from lerobot_craft.core.parameters import MasterWeights, Sharded, like, replace_parameters, run_in, whole
from tests.distributed.ranks import join_ranks, run_on_ranks

STEPS, BATCH, WIDTH = 5, 8, 64


class Layer(nn.Module):
    """Its parts are large enough to be gathered on their own; nobody calls the layer itself."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)


class Policy(nn.Module):
    """As lerobot's: reaches into its layers, shares a weight, and has attention whose parts are read, not called."""

    def __init__(self, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.embed = nn.Embedding(WIDTH, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.embed.weight
        self.only_task = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.eye_(self.only_task.weight)

    def _through(self, layer, x):
        return x + layer.down(torch.tanh(layer.up(layer.norm(x))))

    def hidden(self, tokens, depth):
        x = self.embed(tokens)
        x = x + self.attention(x, x, x)[0]
        for layer in self.layers[:depth]:
            x = (
                checkpoint(self._through, layer, x, use_reentrant=False)
                if self.checkpointing
                else self._through(layer, x)
            )
        return x

    def forward(self, tokens):
        return self.tied(self.only_task(self.head(self.hidden(tokens, 3)))).mean(1)


def batches():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, WIDTH, (STEPS, 2, BATCH, 4), generator=generator)
    values = torch.randn(STEPS, 2, BATCH, WIDTH, generator=generator)
    return zip(tokens, values, strict=True)


def train(part, spread, checkpointing, dtype):
    """Whole parameters, the optimizer's state and reports after a few steps on this process's part of each batch."""
    torch.manual_seed(0)
    policy = Policy(checkpointing).to(dtype)
    # Not Adam: some gradients are zero but for rounding (the bias of keys), and it would take whole steps of them.
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05, momentum=0.5)
    called: nn.Module = policy
    if spread is not None:
        before = dict(policy.named_parameters())
        called = Sharded(policy, spread)
        replace_parameters(optimizer, {p: policy.get_parameter(name) for name, p in before.items()})
        assert all(isinstance(p, DTensor) for p in policy.parameters())
    if dtype == torch.bfloat16:
        MasterWeights(optimizer, policy.named_parameters())
    step = RetentionStep(
        policy.parameters(),
        optimizer,
        Multipliers(Dual(lambda_lr=0.1)),
        surgery=Surgery(conflict_threshold=0.0),
        epsilon=lambda s: 0.1,
    )
    reports = []
    for tokens, values in batches():
        (x, _), (y, t) = tokens[:, part], values[:, part]
        reports.append(
            step(
                lambda x=x, y=y: drift(called.forward(x).float(), y),  # as lerobot calls it
                lambda a=x, t=t - 4 * y: run_in(policy, lambda: AnchorDrift(_drift(policy, a, t))),
            )
        )
    moments = [whole(value) for state in optimizer.state.values() for value in state.values()]
    return [whole(p.detach()) for p in policy.parameters()], moments, [r.anchor for r in reports]


def _drift(policy, tokens, target):
    """Of hidden states before the last layer, by way of the head: what comes in between is not passed through."""
    return drift(policy.tied(policy.head(policy.hidden(tokens, 2))).mean(1).float(), target, reduction="none")


def sharded_steps(rank, world):
    settings = [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)]
    references = [train(slice(None), None, *setting) for setting in settings]
    assert any(a.conflict for a in references[0][2])
    join_ranks(rank, world)
    mesh = init_device_mesh("cpu", (world,))
    part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    for setting, reference in zip(settings, references, strict=True):
        run = train(part, mesh, *setting)
        tolerance = {"rtol": 1e-3, "atol": 1e-5} if setting[1] == torch.float32 else {"rtol": 0.05, "atol": 0.02}
        for mine, expected in zip(run[0] + run[1], reference[0] + reference[1], strict=True):
            assert_close(mine, expected, **tolerance)
        for mine, expected in zip(run[2], reference[2], strict=True):
            assert mine.retention_loss == pytest.approx(expected.retention_loss, rel=0.02)
    check_spreading(mesh)


def check_spreading(mesh):
    """What is read whole comes back whole, each rank keeping its part."""
    policy = Policy(False)
    Sharded(policy, mesh)
    for parameter in policy.parameters():
        value = torch.randn(parameter.shape)
        torch.distributed.broadcast(value, 0)
        spread = like(value, parameter)
        assert spread.to_local().shape == parameter.to_local().shape
        assert torch.equal(whole(spread), value)
    count = torch.tensor(3.0)
    assert like(count, parameter) is count


@pytest.mark.timeout(300)
def test_sharded_steps_on_two_ranks(tmp_path):
    run_on_ranks([sharded_steps], 2, tmp_path)


@pytest.mark.slow  # four processes on two cores
@pytest.mark.timeout(600)
def test_sharded_steps_on_four_ranks(tmp_path):
    run_on_ranks([sharded_steps], 4, tmp_path)
