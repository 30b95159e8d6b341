import pytest
import torch

from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.modes.token_ce import TokenCE
from lerobot_craft.anchors.verify import FLOORS, floor_of
from lerobot_craft.core import drift
from lerobot_craft.policies.pi0_fast import PI0FastAdapter
from lerobot_craft.policies.smolvla import SmolVLAAdapter


def test_rounding_of_confident_logits_is_not_taken_for_drift():
    """Its terms are rounded at the size of log p: by the floor of squared differences, trained ones were refused."""
    generator = torch.Generator().manual_seed(0)
    teacher = 10 * torch.randn(64, 12, 65, generator=generator)
    student = teacher * (1 + 6e-8 * torch.randn(teacher.shape, generator=generator))  # another order of summation
    found = float(drift(student, teacher, "kl", reduction="none").max())
    assert FLOORS["float32"] < found < floor_of("float32", PI0FastAdapter(), Action())
    moved = teacher + 0.01 * torch.randn(teacher.shape, generator=generator)
    floor = floor_of("float32", PI0FastAdapter(), Action())
    assert float(drift(moved, teacher, "kl", reduction="none").min()) > floor


@pytest.mark.parametrize("adapter", [PI0FastAdapter(), SmolVLAAdapter()], ids=["pi0_fast", "smolvla"])
def test_other_values_keep_the_floor_of_squared_differences(adapter):
    assert floor_of("float32", adapter, TokenCE()) == FLOORS["float32"]
    assert floor_of("bfloat16", SmolVLAAdapter(), Action()) == FLOORS["bfloat16"]
