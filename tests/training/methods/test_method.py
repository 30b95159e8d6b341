"""What all methods share."""

import math

import pytest
import torch
from torch import nn

from lerobot_craft.core import NonFiniteGradientError
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.registry import METHODS, make_method


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_whose_slope_hides_nan_is_refused_before_the_step(value, module_context):
    policy = nn.Linear(2, 1)
    context = module_context(policy, method="naive")
    method = make_method(context.config)
    method.start(context)
    method.backward((policy(torch.ones(3, 2)) - torch.tensor([[0.0], [1.0], [value]])).abs().mean())
    with pytest.raises(NonFiniteGradientError, match="the task gradient"):
        method.clip(policy.parameters(), 10.0)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_describes_itself(name):
    method = METHODS[name]
    assert method.name == name
    assert method.holds(CraftConfig(method=name)) or method.held is None, "or the banner cannot say what it holds"
    assert len({other.label for other in METHODS.values()}) == len(METHODS)
    if method.knob is not None:
        assert hasattr(CraftConfig(), method.knob.setting)
        assert method.knob.value in method.knob.grid


@pytest.mark.parametrize("name", ["l2sp", "ewc", "merge"])
def test_what_needs_whole_parameters_does_not_start_with_shards(name, module_context):
    context = module_context(nn.Linear(1, 1), method=name, shard=True)
    with pytest.raises(CraftError, match=rf"--craft\.method={name} needs whole parameters .* without --craft\.shard"):
        METHODS[name]().start(context)
