import json
from dataclasses import replace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.matrix import (
    SCHEMA,
    Evaluation,
    Row,
    before_and_after,
    matrix_table,
    rate_of,
    read_evaluation,
    scores_table,
    sequence_scores,
    write_evaluation,
)


def four(successes):
    return [i < successes for i in range(4)]


def made(**changes):
    """Three checkpoints that learn `b` and then `c`, each losing some of what was there; four episodes per task."""
    rates = {"base": (4, 0, 0), "one": (3, 4, 0), "two": (2, 2, 4)}
    played = {name: dict(zip("abc", map(four, of), strict=True)) for name, of in rates.items()}
    rows = [Row(name, f"runs/{name}", name * 8, successes) for name, successes in played.items()]
    settings = {
        "env": {"type": "reach", "task": "a,b,c"},
        "rename_map": {},
        "n_episodes": 4,
        "batch_size": 2,
        "seed": 7,
    }
    whole = {"schema": SCHEMA, "craft_version": "1", "created": "2026-01-02T03:04:05+00:00", "command": "craft eval"}
    return Evaluation(**(whole | settings | {"learned": ["b", "c"], "rows": rows} | changes))


def test_what_is_written_is_read(tmp_path):
    write_evaluation(tmp_path / "evaluation.json", made())
    assert read_evaluation(tmp_path / "evaluation.json") == made()


def test_a_file_from_before_renaming_is_read_as_one_without(tmp_path):
    path = tmp_path / "evaluation.json"
    write_evaluation(path, made())
    content = json.loads(path.read_text())
    assert content.pop("rename_map") == {}
    path.write_text(json.dumps(content | {"schema": 1}))
    assert read_evaluation(path) == made()


def test_the_rows_of_a_sequence_are_its_stages():
    matrix = made().sequence()
    assert matrix.base_tasks == ("a",)
    assert matrix.history("a") == [1.0, 0.75, 0.5]
    assert matrix.history("c") == [1.0]


def test_rows_beside_a_sequence_are_none_of_its_stages():
    other = Row("other", "runs/other", "x", {})
    assert made(rows=[*made().rows, other]).sequence() == made().sequence()


def test_there_is_no_sequence_without_order_or_before_all_is_played():
    assert made(learned=[]).sequence() is None
    base, one, two = made().rows
    assert made(rows=[base, one, replace(two, successes={})]).sequence() is None


@pytest.mark.parametrize(
    "change",
    [{"env": {"type": "other"}}, {"rename_map": {"a": "b"}}, {"n_episodes": 5}, {"batch_size": 1}, {"seed": 8}],
    ids=str,
)
def test_other_settings_do_not_go_on_with_an_evaluation(change):
    with pytest.raises(CraftError, match=f"another {next(iter(change))} already.*another --output_dir"):
        made(rows=[], **change).going_on_from(made())


def test_rows_are_kept_and_another_policy_under_the_same_name_is_refused():
    gone_on = made(rows=[], command="again").going_on_from(made())
    assert (gone_on.rows, gone_on.command) == (made().rows, "again")
    assert gone_on.with_row(replace(made().rows[0], successes={})) == gone_on
    with pytest.raises(CraftError, match="base was evaluated already, but as another policy"):
        gone_on.with_row(replace(made().rows[0], fingerprint="other"))


def test_an_entry_goes_into_its_row():
    entered = made().with_entry("one", "d", [True, False, False, False])
    assert entered.row("one").rate("d") == 0.25
    assert [row.name for row in entered.rows if "d" in row.successes] == ["one"]
    assert entered.tasks == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("asked", "tasks"),
    [
        ("c, a,b", ["c", "a", "b"]),
        ("libero", ["libero/2", "libero/10"]),
        ("elsewhere", ["b", "a"]),  # of an environment that names its tasks in its own way: as they come
        (None, ["b", "a"]),
    ],
)
def test_tasks_come_in_the_order_in_which_they_were_asked_for_also_when_read_back(tmp_path, asked, tasks):
    row = Row("base", "runs/base", "x", {task: four(1) for task in tasks})
    evaluation = made(env={"type": "reach", "task": asked}, rows=[row], learned=[])
    assert evaluation.tasks == tasks
    write_evaluation(tmp_path / "evaluation.json", evaluation)
    known = asked in ("c, a,b", "libero")
    assert read_evaluation(tmp_path / "evaluation.json").tasks == (tasks if known else sorted(tasks))


def test_rows_come_in_the_order_in_which_they_were_asked_for():
    assert [row.name for row in made().in_order(["two", "base"]).rows] == ["two", "base", "one"]


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (lambda content: content.update(schema=3), "schema 2, the file has 3"),
        (lambda content: content.update(schema=1), "schema 2, the file has 1"),  # which had no rename_map
        (lambda content: content.update(schema=True) or content.pop("rename_map"), "schema"),
        (lambda content: content.update(extra=1), "extra: unknown field"),
        (lambda content: content["rows"][0]["successes"]["a"].pop(), "base has 3 episodes of a, expected 4"),
        (lambda content: content["rows"].append(content["rows"][0]), "two have the same name"),
        (lambda content: content["rows"][0]["successes"].update(a=[1, 1, 1, 1]), "successes"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(tmp_path, harm, complaint):
    path = tmp_path / "evaluation.json"
    write_evaluation(path, made())
    content = json.loads(path.read_text())
    harm(content)
    path.write_text(json.dumps(content))
    with pytest.raises(CraftError, match=complaint):
        read_evaluation(path)


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
