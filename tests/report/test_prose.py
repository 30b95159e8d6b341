from dataclasses import replace

import pytest

from lerobot_craft.evaluation.results import Estimate
from lerobot_craft.evaluation.summary import summarise
from lerobot_craft.report.page import headline, say
from tests.evaluation.made_results import made_runs


@pytest.fixture(scope="module")
def rows():
    values = {("base", 0): 0.99, ("naive", 0): 0.31, ("craft", 0): 0.92, ("craft", 20): 0.97}
    made = summarise(made_runs(seeds=(0,), policies=("smolvla",)))
    kept = [row for row in made if (row.method, row.frames) in values and row.role == "final"]
    return [
        replace(
            row,
            old_mean=Estimate(values[row.method, row.frames], 0.0, 1.0),
            same_scene=Estimate(values[row.method, row.frames] / 2, 0.0, 1.0),
            new=Estimate(0.9, 0.0, 1.0),
        )
        for row in kept
    ]


def plain(text):
    return text.replace("\u00a0", " ")


def test_the_sentence_is_made_from_the_numbers(rows):
    assert plain(say(rows)) == (
        "smolvla: plain fine-tuning takes success on the old tasks from 99 % to 31 %, and on those in the new "
        "task's scene from 50 % to 16 %. CRaFT leaves 92 % without any old frame, 97 % with 20 old frames (same "
        "scene: 46 % and 48 %). The new task itself: 90 % after plain fine-tuning; 90 % and 90 % after CRaFT."
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tier": "instructions"}, "CRaFT leaves 92 % with the instructions alone"),
        ({"tier": "rollouts", "rollouts": 3}, "CRaFT leaves 92 % with 3 rollouts per old task"),
        ({"tier": "frames", "frames": 20}, "CRaFT leaves 92 % with 20 old frames"),
        ({"tier": "everything", "frames": None}, "CRaFT leaves 92 % with all old frames"),
    ],
)
def test_it_says_what_the_user_has(rows, fields, said):
    assert said in plain(say([*rows[:2], replace(rows[2], **fields)]))


def test_bad_news_is_told_as_well(rows):
    worse = [replace(row, old_mean=Estimate(0.05, 0, 1)) if row.method == "craft" else row for row in rows]
    assert "CRaFT leaves 5 % without any old frame" in plain(say(worse))


def test_without_plain_or_craft_it_says_what_there_is(rows):
    assert "success on the old tasks is 99 % before" in plain(say([row for row in rows if row.method != "naive"]))
    only_plain = say([row for row in rows if row.method in ("base", "naive")])
    assert plain(only_plain).endswith("The new task itself: 90 % after plain fine-tuning.")
    assert say(rows[:1]) is None
    assert headline(rows[:1]) == []


def test_another_method_speaks_where_the_recipe_was_not_run(rows):
    others = [replace(row, method="ewc", label="EWC") if row.method == "craft" else row for row in rows]
    assert "EWC leaves 97 % with 20 old frames" in plain(say(others))


def test_final_scenarios_speak_before_tuning_ones(rows):
    tuning = [replace(row, role="tuning", policy="other") for row in rows]
    assert [line.partition(":")[0] for line in headline([*rows, *tuning])] == ["smolvla"]
    assert [line.partition(":")[0] for line in headline(tuning)] == ["other"]
