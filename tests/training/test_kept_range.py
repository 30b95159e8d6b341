"""Where new data leave the kept range; every number must be what lerobot's own step makes of them."""

import pytest
import torch

from lerobot_craft.training.normalization import outside, warning_lines

STATE = "observation.state"
ENDS = {
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MEAN_STD": ("min", "max"),
}
TEACHER = {
    "min": [-1.0, 0.0, 5.0, 0.0],
    "max": [1.0, 10.0, 5.0, 1.0],
    "q01": [-0.9, 0.1, 5.0, 0.1],
    "q99": [0.9, 9.9, 5.0, 0.9],
    "q10": [-0.5, 1.0, 5.0, 0.2],
    "q90": [0.5, 9.0, 5.0, 0.8],
    "mean": [0.0, 5.0, 5.0, 0.5],
    "std": [0.2, 2.0, 0.0, 0.3],
}
# Dimension 0 goes far out, 1 stays well inside, 2 moves where the teacher's stood still, 3 is the teacher's own.
NEW = {name: [3 * TEACHER[name][0], 5.0, 5.5, TEACHER[name][3]] for name in ("min", "max", "q01", "q99", "q10", "q90")}


def as_tensors(stats):
    return {STATE: {name: torch.tensor(values) for name, values in stats.items()}}


def lerobots(mode, values):
    """What lerobot's normalizer makes of a state, with the teacher's statistics."""
    from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
    from lerobot.processor import NormalizerProcessorStep

    step = NormalizerProcessorStep(
        features={STATE: PolicyFeature(FeatureType.STATE, (4,))},
        norm_map={FeatureType.STATE: NormalizationMode(mode)},
        stats=as_tensors(TEACHER),
    )
    return step._normalize_observation({STATE: torch.tensor(values)}, inverse=False)[STATE].tolist()


@pytest.mark.parametrize("mode", ENDS)
def test_spans_are_what_lerobots_normalizer_makes_of_the_new_ends(mode):
    found = {each.dimension: each for each in outside(as_tensors(TEACHER), as_tensors(NEW), {STATE: mode})}
    assert set(found) == {0, 2}
    low, high = (lerobots(mode, NEW[end]) for end in ENDS[mode])
    for dimension, each in found.items():
        assert (each.low, each.high) == (low[dimension], high[dimension])
    assert found[2].constant == 5.0
    assert found[0].constant is None


def test_a_line_says_where_and_how_far():
    lines = warning_lines(as_tensors(TEACHER), as_tensors(NEW), {STATE: "MIN_MAX"})
    assert lines == [
        "observation.state[2]: always 5 in the teacher's data, 5.5 .. 5.5 in the new; normalized that becomes "
        "1e+08 .. 1e+08",
        "observation.state[0]: the new data spans -3 .. 3 where the teacher's spans -1 .. 1",
    ]
    assert "observation.state[0]: the new data spans -15 .. 15 standard deviations from the teacher's mean" in (
        warning_lines(as_tensors(TEACHER), as_tensors(NEW), {STATE: "MEAN_STD"})
    )


def test_the_teachers_own_data_are_inside():
    for mode in ENDS:
        assert warning_lines(as_tensors(TEACHER), as_tensors(TEACHER), {STATE: mode}) == []


@pytest.mark.parametrize(("top", "told"), [(1.09, False), (1.11, True), (float("nan"), False)])
def test_a_hairs_breadth_is_not_worth_a_word(top, told):
    new = as_tensors({**TEACHER, "max": [top, 10.0, 5.0, 1.0]})
    assert bool(warning_lines(as_tensors(TEACHER), new, {STATE: "MIN_MAX"})) == told


def test_data_without_quantiles_are_judged_by_their_smallest_and_largest():
    new = as_tensors({name: NEW[name] for name in ("min", "max")})
    found = outside(as_tensors(TEACHER), new, {STATE: "QUANTILES"})
    assert {each.dimension: each for each in found}[0].high == lerobots("QUANTILES", NEW["max"])[0]


def test_what_is_not_normalized_has_no_range():
    assert warning_lines(as_tensors(TEACHER), as_tensors(NEW), {STATE: "IDENTITY"}) == []
    assert outside(as_tensors(TEACHER), {}, {STATE: "MIN_MAX"}) == []


def test_a_teacher_without_statistics_is_named():
    (line,) = warning_lines({}, as_tensors(NEW), {STATE: "MIN_MAX"})
    assert line.startswith("observation.state: the teacher ships no statistics")


def test_many_dimensions_are_cut_short_the_farthest_first():
    teacher = {"action": {"min": -torch.ones(20), "max": torch.ones(20)}}
    new = {"action": {"min": -torch.ones(20), "max": torch.arange(2.0, 22.0)}}
    lines = warning_lines(teacher, new, {"action": "MIN_MAX"})
    assert len(lines) == 9
    assert lines[0].startswith("action[19]: the new data spans -1 .. 21")
    assert lines[-1] == "and 12 more dimensions outside the teacher's range"


def test_image_channels_are_dimensions_too():
    camera = "observation.images.top"
    teacher = {camera: {"mean": torch.zeros(3, 1, 1), "std": torch.full((3, 1, 1), 0.1)}}
    new = {camera: {"min": torch.zeros(3, 1, 1), "max": torch.tensor([0.2, 0.9, 0.3]).reshape(3, 1, 1)}}
    assert [each.dimension for each in outside(teacher, new, {camera: "MEAN_STD"})] == [1]


def test_a_dimension_has_the_name_that_the_new_dataset_gives_it():
    lines = warning_lines(
        as_tensors(TEACHER), as_tensors(NEW), {STATE: "MIN_MAX"}, {STATE: ["shoulder", "elbow", "gripper"]}
    )
    assert [line.partition(":")[0] for line in lines] == [
        "observation.state[2] (gripper)",
        "observation.state[0] (shoulder)",
    ]
