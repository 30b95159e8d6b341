"""Invariant: N ranks take the step of one rank with the N-fold batch, however the model is spread over them."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from lerobot_craft.core import AnchorDrift, Dual, Multipliers, RetentionStep, Surgery, drift
from lerobot_craft.core.gradients import inner_products, inner_products_by_part
from lerobot_craft.core.ranks import Divergence, find_divergence
from tests.distributed.ranks import join_ranks, run_on_ranks

STEPS, BATCH = 6, 8
GROUPS = ("pick", "place", "push")


class Policy(nn.Module):
    """A trunk that both losses reach, a head each, and an expert that only anchors of group 2 use.

    With `skips`, a batch without such anchors does not run the expert at all, so that ranks reach different parameters.
    DDP can carry that; FSDP2 cannot, with or without retention.
    """

    def __init__(self, skips):
        super().__init__()
        self.skips = skips
        self.trunk = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.task_head = nn.Linear(8, 3)
        self.retention_head = nn.Linear(8, 5)
        self.expert = nn.Linear(8, 5)

    def forward(self, x, groups=None):
        for layer in self.trunk:
            x = torch.tanh(layer(x))
        if groups is None:
            return self.task_head(x)
        out = self.retention_head(x)
        if (groups == 2).any() or not self.skips:
            out = out + self.expert(x) * (groups == 2).unsqueeze(-1)
        return out


def batches():
    """The same for every process. Rank 0's half of the anchors never has group 2, and the counts are uneven."""
    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(STEPS, BATCH, n, generator=generator) for n in (8, 3, 8, 5)]
    groups = torch.tensor([0, 0, 0, 1, 0, 1, 2, 2])
    return [(*(d[i] for d in draw), groups) for i in range(STEPS)]


def train(wrap, part=slice(None), anchors_through_wrapper=False, **settings):
    """Full parameters, multipliers and reports after `STEPS` steps on this process's `part` of each batch."""
    torch.manual_seed(0)
    policy = Policy(skips=not anchors_through_wrapper)
    wrapped = wrap(policy)
    student = wrapped if anchors_through_wrapper else policy
    step = RetentionStep(
        wrapped.parameters(),
        torch.optim.AdamW(wrapped.parameters(), lr=0.01),
        Multipliers(Dual("pi", lambda_lr=0.1), GROUPS),
        epsilon=lambda s: 0.5,
        **settings,
    )
    reports = []
    for batch in batches():
        x, y, anchor_x, target, groups = (b[part] for b in batch)
        reports.append(
            step(
                lambda x=x, y=y: drift(wrapped(x), y),
                lambda a=anchor_x, t=target, g=groups: AnchorDrift(drift(student(a, g), t, reduction="none"), g),
            )
        )
    full = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in wrapped.parameters()]
    return full, step.multipliers.values, [r.anchor for r in reports]


def assert_same_run(run, reference):
    for p, q in zip(run[0], reference[0], strict=True):
        assert_close(p, q, rtol=1e-4, atol=1e-5)
    assert run[1] == pytest.approx(reference[1], rel=1e-5)
    for a, b in zip(run[2], reference[2], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.group_losses == pytest.approx(b.group_losses, rel=1e-4)
        if b is not None and b.dot is not None:  # one process that adds gradients has none of each
            assert (a.dot, a.cos, a.conflict) == pytest.approx((b.dot, b.cos, b.conflict), rel=1e-3, abs=1e-6)


def my_part(rank, world):
    return slice(rank * BATCH // world, (rank + 1) * BATCH // world)


SETTINGS = {
    "projection": {"surgery": Surgery(conflict_threshold=0.0)},
    "bounds": {"surgery": Surgery(task_max_norm=0.1, retention_max_norm=0.2, merged_max_norm=0.15)},
    "k-step": {"retention_freq": 3},
    "sum": {"surgery": Surgery(use_grad_projection=False, task_max_norm=math.inf, retention_max_norm=math.inf)},
}


def ddp_steps(rank, world):
    references = {name: train(lambda p: p, **settings) for name, settings in SETTINGS.items()}
    assert any(a.conflict for a in references["projection"][2])
    assert not all(a.conflict for a in references["projection"][2])
    join_ranks(rank, world)
    for name, settings in SETTINGS.items():
        for options in (
            {"find_unused_parameters": True},
            {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        ):
            run = train(lambda p, o=options: DistributedDataParallel(p, **o), my_part(rank, world), **settings)
            assert_same_run(run, references[name])


def sharded_steps(rank, world, mesh_shape):
    references = {name: train(lambda p: p, **settings) for name, settings in SETTINGS.items()}
    join_ranks(rank, world)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])

    def shard(policy):
        for layer in policy.trunk:
            fully_shard(layer, mesh=mesh)
        return fully_shard(policy, mesh=mesh)

    for name, settings in SETTINGS.items():
        run = train(shard, my_part(rank, world), anchors_through_wrapper=True, **settings)
        assert_same_run(run, references[name])


def fsdp_steps(rank, world):
    sharded_steps(rank, world, mesh_shape=(world,))


def hsdp_steps(rank, world):
    """Every shard has a replica."""
    sharded_steps(rank, world, mesh_shape=(2, world // 2))


def check_shards_with_another_sign(rank, world):
    """Rank 0 holds the rows on which the gradients conflict; on the whole they agree, and the other way round."""
    mesh = init_device_mesh("cpu", (world,))
    for sign in (1.0, -1.0):
        layer = nn.Linear(3, 4, bias=False)
        fully_shard(layer, mesh=mesh)
        rows = sign * torch.tensor([-1.0, -1.0, 3.0, 3.0])
        step = RetentionStep(
            layer.parameters(),
            torch.optim.SGD(layer.parameters(), lr=0.0),
            Multipliers(Dual(lambda_lr=0.0)),
            surgery=Surgery(conflict_threshold=0.0),
        )
        report = step.backward(
            lambda layer=layer: layer(torch.ones(1, 3)).sum(),
            lambda layer=layer, rows=rows: (layer(torch.ones(1, 3)) * rows).sum(),
        )
        task = torch.ones(4, 3)
        retention = rows[:, None].expand(4, 3)
        local = slice(2 * rank, 2 * rank + 2)
        local_dot, dot = (task[local] * retention[local]).sum(), (task * retention).sum()
        assert rank == 1 or local_dot.sign() == -dot.sign()
        assert report.anchor.dot == pytest.approx(dot.item())
        assert report.anchor.conflict == (sign < 0)
        projected = task - (dot / retention.square().sum()) * retention if sign < 0 else task
        assert_close(layer.weight.grad.full_tensor(), projected + retention)


def check_anchors_with_another_sign(rank, world):
    """DDP: rank 0's anchors conflict with the task, all anchors together agree with it."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    step = RetentionStep(
        model.parameters(), torch.optim.SGD(model.parameters(), lr=0.0), Multipliers(Dual(lambda_lr=0.0))
    )
    local = -1.0 if rank == 0 else 3.0
    report = step.backward(lambda: model(torch.ones(1, 2)).sum(), lambda: local * model.module(torch.ones(1, 2)).sum())
    assert report.anchor.cos == pytest.approx(1.0)
    assert not report.anchor.conflict
    assert_close(model.module.weight.grad, torch.full((1, 2), 2.0))


def check_replicated_and_sharded(rank, world):
    """A plain tensor, held by every rank, must count once; a DTensor's shards must add up."""
    mesh = init_device_mesh("cpu", (world,))
    layer = fully_shard(nn.Linear(2, 3, bias=False), mesh=mesh)  # 3 rows: shards of different length
    layer(torch.ones(1, 2)).sum().backward()
    sharded, plain = layer.weight.grad, torch.full((5,), 2.0)
    assert inner_products([sharded, plain], [None, plain]) == pytest.approx((6 + 20, 20, 20))
    parts = inner_products_by_part([sharded, plain], [None, plain], [1, 0])
    assert [number for products in parts for number in products] == pytest.approx([26, 20, 20, 20, 20, 20, 6, 0, 0])


def signs(rank, world):
    join_ranks(rank, world)
    check_shards_with_another_sign(rank, world)
    check_anchors_with_another_sign(rank, world)
    check_replicated_and_sharded(rank, world)


def divergence(rank, world):
    """A bit of one weight, or a number, on one rank: every rank is told which it is."""
    join_ranks(rank, world)
    torch.manual_seed(0)
    weights = {"first": torch.randn(3, 4).bfloat16(), "second": torch.randn(5), "nan": torch.full((2,), float("nan"))}
    numbers = {"multipliers": -(2**63)}
    assert find_divergence(weights, numbers) is None
    odd = world - 1
    if rank == odd:
        weights["second"].view(torch.int32)[3] += 1
    assert find_divergence(weights, numbers) == Divergence([odd], "second")
    if rank == odd:
        weights["second"].view(torch.int32)[3] -= 1
        numbers = {"multipliers": 5}
    assert find_divergence(weights, numbers) == Divergence([odd], "multipliers")
    sharded = fully_shard(nn.Linear(2, 4), mesh=init_device_mesh("cpu", (world,)))
    assert find_divergence(dict(sharded.named_parameters())) is None, "no two ranks hold the same part"
    if world > 2:  # most decide, not the main one
        held = {"weight": torch.full((2,), float(rank == 0))}
        assert find_divergence(held) == Divergence([0], "weight")


@pytest.mark.timeout(300)
def test_two_ranks(tmp_path):
    run_on_ranks([ddp_steps, fsdp_steps, signs, divergence], 2, tmp_path)


@pytest.mark.slow  # four processes on two cores
@pytest.mark.timeout(600)
def test_four_ranks(tmp_path):
    run_on_ranks([ddp_steps, fsdp_steps, hsdp_steps, divergence], 4, tmp_path)
