"""What all methods share."""

import math

import pytest
import torch
from torch import nn

from lerobot_craft.core import NonFiniteGradientError
from lerobot_craft.training.methods.registry import make_method


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_whose_slope_hides_nan_is_refused_before_the_step(value, module_context):
    policy = nn.Linear(2, 1)
    context = module_context(policy, method="naive")
    method = make_method(context.config)
    method.start(context)
    method.backward((policy(torch.ones(3, 2)) - torch.tensor([[0.0], [1.0], [value]])).abs().mean())
    with pytest.raises(NonFiniteGradientError, match="the task gradient"):
        method.clip(policy.parameters(), 10.0)
