from dataclasses import replace

import pytest

from lerobot_craft.evaluation.matrix_table import before_and_after, matrix_table, rate_of, scores_table, sequence_scores
from tests.evaluation.test_matrix import made


def test_rates_stand_with_wilsons_interval():
    rate = rate_of(made().rows[1], "a")
    assert (rate.value, rate.low, rate.high) == pytest.approx((0.75, 0.3006, 0.9544), abs=1e-4)
    lines = matrix_table(made()).splitlines()
    assert lines[0] == "n = 4 episodes per task, 95% intervals (Wilson)"
    assert lines[2] == "| checkpoint | a | b | c | mean |"
    assert lines[5] == "| one | 0.75 [0.30, 0.95] | 1.00 [0.51, 1.00] | 0.00 [0.00, 0.49] | 0.58 |"


def test_a_card_shows_the_policy_before_by_its_fingerprint_and_not_by_its_place():
    base, one, two = made().rows
    lines = before_and_after(made(rows=[two, one, base]), one, base.fingerprint).splitlines()
    assert lines[:2] == ["| | a | b | c |", "|---|---|---|---|"]
    assert lines[2].startswith("| before fine-tuning | 1.00 [0.51, 1.00] | 0.00")
    assert lines[3].startswith("| this checkpoint | 0.75 [0.30, 0.95] | 1.00")
    assert "n = 4 episodes per task from the same start states (seed 7)" in lines[5]


def test_a_card_says_when_the_policy_before_was_not_evaluated():
    text = before_and_after(made(), made().rows[1], "another")
    assert "before fine-tuning |" not in text
    assert text.endswith("The policy before fine-tuning was not evaluated beside it.")


def test_what_was_not_played_is_a_dash_and_has_no_mean():
    base, one, two = made().rows
    unfinished = made(rows=[base, replace(one, successes={"a": one.successes["a"]}), two])
    assert matrix_table(unfinished).splitlines()[5] == "| one | 0.75 [0.30, 0.95] | - | - | - |"


def test_the_scores_of_a_sequence():
    # a: lost 0.25, then 0.5, mean 0.375; b: lost 0.5; c is the last and has no later stage.
    scores = {name: score.value for name, score in sequence_scores(made())}
    assert scores == pytest.approx(
        {
            "NBT, all tasks": (0.375 + 0.5) / 2,
            "NBT, new tasks": 0.5,
            "FWT, new tasks": 1.0,
            "AUC, all tasks": (0.75 + 0.75 + 1.0) / 3,
            "AUC, new tasks": (0.75 + 1.0) / 2,
        }
    )
    assert "| NBT, all tasks | 0.44 ± " in scores_table(made())


def test_checkpoints_in_no_order_have_no_scores():
    assert sequence_scores(made(learned=[])) == []
    assert scores_table(made(learned=[])) == ""
