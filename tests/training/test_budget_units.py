"""Units of the budget are positive and finite, or a person is told."""

import math

import pytest

from lerobot_craft.anchors.manifest import Scale
from lerobot_craft.errors import CraftError
from lerobot_craft.training.anchor_batches import layer_scales_of, units_of


def scales(*values):
    return [Scale("spread", 4, {"mse": value, "l1": 1.0}) for value in values]


def test_what_was_measured_is_used(caplog):
    assert units_of(scales(0.5, 2.0), ["a", "b"], "mse") == [0.5, 2.0]
    assert units_of(scales(0.5, 2.0), ["a", "b"], "l1") == [1.0, 1.0]
    assert not caplog.records


@pytest.mark.parametrize("bad", [0.0, 1e-30, math.nan, math.inf, -1.0])
def test_a_unit_that_cannot_be_used_is_replaced_with_a_warning(bad, caplog):
    assert units_of(scales(0.5, bad, 1.5), ["a", "open it", "c"], "mse") == [0.5, 1.0, 1.5]
    assert "no unit for the budget of open it" in caplog.text
    assert units_of(scales(bad), ["a"], "mse") == [1.0]


def test_a_loss_that_was_not_measured_is_refused():
    with pytest.raises(CraftError, match=r"--craft.loss_type=kl: use mse or l1"):
        units_of(scales(1.0), ["a"], "kl")


def test_layer_scales(caplog):
    assert layer_scales_of(None, "mse") is None
    assert layer_scales_of({}, "mse") is None
    assert layer_scales_of({"2": {"mse": 3.0}, "3": {"mse": 0.0}}, "mse") == {"2": 3.0, "3": 3.0}
    assert "layers 3 do not vary" in caplog.text
