import pytest

from lerobot_craft.report.families import BEFORE, CRAFT, OTHER, PLAIN, REPLAY, family_of


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("base", BEFORE),
        ("naive", PLAIN),
        ("er", REPLAY),
        ("craft", CRAFT),
        ("hidden_pooled", CRAFT),
        ("floor_1", CRAFT),  # sweeps of CRaFT's own settings are named after the setting
        ("ascent_lr_0.1", CRAFT),
        ("ewc", OTHER),
        ("freeze", OTHER),
    ],
)
def test_ablations_are_of_the_family_that_they_take_apart(method, family):
    assert family_of(method) is family
