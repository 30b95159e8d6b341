import itertools
import math

import pytest

from lerobot_craft.report.figures import (
    BEFORE,
    CRAFT,
    FAMILIES,
    OTHER,
    PLAIN,
    REPLAY,
    Axes,
    Line,
    Scale,
    apart,
    curves,
    family_of,
    spread,
)
from lerobot_craft.report.templates import part


@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [0.3], [0.0], [-2.0, 5.0], [1e-5, 3.0], [0.02, 0.021], [7.0, 7.0], [1e-9, 2e-9]]
)
def test_a_scale_holds_its_values_and_has_a_few_round_ticks(values):
    scale = Scale.of(values)
    assert all(0 <= scale.position(value) <= 1 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert all(-1e-9 <= scale.position(tick) <= 1 + 1e-9 for tick in ticks)
    assert all(float(f"{tick:.3g}") == pytest.approx(tick) for tick in ticks)


def test_positive_values_over_decades_are_logarithmic():
    assert Scale.of([0.001, 1.0]).log
    assert not Scale.of([0.0, 1.0]).log
    assert Scale.of([0.001, 1.0]).position(math.sqrt(0.001)) == pytest.approx(0.5)


def test_up_is_up():
    axes = Axes(Scale(0, 1), Scale(0, 1))
    assert axes.at(0, 1)[1] < axes.at(0, 0)[1]
    assert axes.at(1, 0)[0] > axes.at(0, 0)[0]


def test_badges_cover_neither_each_other_nor_other_points():
    axes = Axes(Scale(0, 1), Scale(0, 1))
    points = [axes.at(x, 1.0) for x in (1.0, 1.0, 0.99, 0.98, 0.98, 0.5, 0.97, 1.0)]
    badges = spread(points, axes)
    assert badges[5] == points[5]  # alone, it stays
    assert all(math.dist(a, b) >= 17 for a, b in itertools.combinations(badges, 2))
    assert all(0 < x < axes.width and y > 0 for x, y in badges)
    assert all(math.dist(b, p) < 90 for b, p in zip(badges, points, strict=True))


def test_labels_move_down_only_as_far_as_they_must():
    assert apart([11.0, 40.0, 10.0]) == [23.0, 40.0, 10.0]


def test_a_curve_has_its_label_at_its_end_and_leaves_out_what_a_logarithm_does_not_have():
    axes = Axes(Scale(0, 2), Scale(0.01, 1.0, log=True))
    gone, left = (Line([(0, 0.0), (1, last), (2, 0.1)], "trace", None, "1", "craft") for last in (0.0, 1.0))
    short, long = curves(axes, [gone, left])
    assert short.points == [axes.at(2, 0.1)]
    assert long.points == [axes.at(1, 1.0), axes.at(2, 0.1)]
    assert long.label_x == axes.at(2, 0.1)[0] + 5
    assert abs(long.label_y - short.label_y) == 13
    assert curves(axes, [Line([(0, 0.0)], "trace", None, "1", "craft")]) == []


def test_families_differ_by_shape_and_not_only_by_colour():
    drawn = {part("legend", [family]).replace(family.css, "").replace(family.name, "") for family in FAMILIES}
    assert len(drawn) == len(FAMILIES)


@pytest.mark.parametrize(
    ("method", "family"),
    [
        ("base", BEFORE),
        ("naive", PLAIN),
        ("er", REPLAY),
        ("joint", REPLAY),
        ("craft", CRAFT),
        ("craft_fixed_lambda", CRAFT),
        ("hidden_pooled", CRAFT),
        ("floor_1", CRAFT),  # sweeps of CRaFT's own settings are named after the setting
        ("ascent_lr_0.1", CRAFT),
        ("ewc", OTHER),
        ("freeze", OTHER),
    ],
)
def test_ablations_belong_to_the_family_that_they_change(method, family):
    assert family_of(method) is family
