from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.estimate import (
    DDP_BUCKETS,
    FSDP_GATHERED,
    EstimateConfig,
    method_parts,
    share,
    shared_parts,
)


@pytest.fixture
def policy():
    """A root of 40 bytes and three blocks of 400, the last of them frozen."""
    module = nn.ModuleDict(
        {
            "root": nn.Linear(10, 1, bias=False),
            "layers": nn.ModuleList([nn.Linear(10, 10, bias=False) for _ in range(3)]),
        }
    )
    module["layers"][2].requires_grad_(False)
    return module


def test_one_device_shares_nothing(policy):
    assert shared_parts(EstimateConfig(), policy) == {}
    assert share(EstimateConfig()) == 1


def test_ddp_holds_the_gradients_once_more(policy):
    options = EstimateConfig(world_size=8)
    assert shared_parts(options, policy) == {DDP_BUCKETS: 40 + 2 * 400}
    assert share(options) == 1


def test_fsdp_gathers_the_root_and_two_blocks_with_their_gradients(policy):
    options = EstimateConfig(world_size=8, strategy="fsdp")
    assert shared_parts(options, policy) == {FSDP_GATHERED: 2 * 40 + 2 * 2 * 400}
    assert share(options) == 1 / 8


@pytest.mark.parametrize(("options", "devices"), [({}, 1), ({"world_size": 8}, 1), ({"strategy": "fsdp"}, 8)])
def test_float32_copies_are_of_the_part_of_a_weight_that_a_device_holds(policy, options, devices):
    craft = CraftConfig(enabled=True, method="naive", master_weights=True)
    options = EstimateConfig(**{"world_size": devices, **options})
    parts = method_parts(SimpleNamespace(batch_size=2), craft, policy.to(torch.bfloat16), options)
    assert parts.kept == {"float32 copies of bfloat16 weights": (40 + 2 * 400) // devices}


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"world_size": 0}, "at least 1"),
        ({"strategy": "zero"}, "ddp, fsdp"),
        ({"strategy": "fsdp"}, "world_size=8"),
    ],
)
def test_flags_that_do_not_go_together(flags, complaint):
    with pytest.raises(CraftError, match=complaint):
        EstimateConfig(**flags)
