import pytest

from lerobot_craft.evaluation.continual import SuccessMatrix, auc, fwt, nbt

# Two base tasks, three learnt. Worked by hand from the paper's formulas.
MATRIX = SuccessMatrix(
    after=[
        {"a": 1.0, "b": 0.8, "x": 0.0, "y": 0.0, "z": 0.1},
        {"a": 0.9, "b": 0.8, "x": 1.0, "y": 0.0, "z": 0.1},
        {"a": 0.6, "b": 0.4, "x": 0.7, "y": 0.9, "z": 0.1},
        {"a": 0.3, "b": 0.6, "x": 0.5, "y": 0.7, "z": 1.0},
    ],
    learnt=["x", "y", "z"],
    n_episodes=20,
)


def test_tasks_are_told_apart():
    assert MATRIX.base_tasks == ("a", "b")
    assert MATRIX.all_tasks == ("a", "b", "x", "y", "z")
    assert MATRIX.history("b") == [0.8, 0.8, 0.4, 0.6]
    assert MATRIX.history("y") == [0.9, 0.7]


def test_nbt_over_new_tasks_leaves_the_last_out():
    # x: 1.0 - mean(0.7, 0.5) = 0.4; y: 0.9 - 0.7 = 0.2; z has no later stage.
    assert nbt(MATRIX, MATRIX.new_tasks).value == pytest.approx(0.3)


def test_nbt_over_all_tasks_counts_what_the_policy_came_with():
    # a: 1.0 - 0.6 = 0.4; b: 0.8 - 0.6 = 0.2; x 0.4; y 0.2.
    assert nbt(MATRIX, MATRIX.all_tasks).value == pytest.approx(0.3)
    assert nbt(MATRIX, ["a"]).value == pytest.approx(0.4)


def test_fwt_and_auc():
    assert fwt(MATRIX, MATRIX.new_tasks).value == pytest.approx((1.0 + 0.9 + 1.0) / 3)
    # x: mean(1, .7, .5); y: mean(.9, .7); z: 1.
    assert auc(MATRIX, MATRIX.new_tasks).value == pytest.approx((2.2 / 3 + 0.8 + 1.0) / 3)
    assert auc(MATRIX, ["a"]).value == pytest.approx((1.0 + 0.9 + 0.6 + 0.3) / 4)


def test_a_policy_that_forgets_nothing_scores_zero_and_one():
    kept = SuccessMatrix([{"a": 1.0, "x": 0.0}, {"a": 1.0, "x": 1.0}], ["x"], 20)
    assert nbt(kept, kept.all_tasks).value == 0.0
    assert auc(kept, kept.all_tasks).value == 1.0
    assert nbt(kept, kept.new_tasks) is None


def test_more_episodes_leave_a_smaller_error():
    few, many = (SuccessMatrix(MATRIX.after, MATRIX.learnt, n) for n in (20, 2000))
    assert nbt(few, few.all_tasks).error > 8 * nbt(many, many.all_tasks).error
    sure = SuccessMatrix([{"a": 1.0, "x": 0.0}, {"a": 1.0, "x": 1.0}], ["x"], 20)
    assert 0.05 < nbt(sure, ["a"]).error < 0.15  # not zero: twenty of twenty is not certainty


def test_a_matrix_that_does_not_fit_its_stages_is_refused():
    with pytest.raises(ValueError, match="2 stages need 3 rows"):
        SuccessMatrix([{"a": 1.0}], ["x", "y"], 20)
    with pytest.raises(ValueError, match="two stages"):
        SuccessMatrix([{"x": 1.0}] * 3, ["x", "x"], 20)
