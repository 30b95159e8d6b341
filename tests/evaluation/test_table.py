from dataclasses import replace

import pytest

from lerobot_craft.evaluation.results import Estimate, Knob
from lerobot_craft.evaluation.summary import summarise, summarise_sequences
from lerobot_craft.evaluation.table import format_estimate, name_of, number, sequence_table, summary_table
from tests.evaluation.made_results import METHODS, made_runs, made_sequences, with_episodes


@pytest.fixture(scope="module")
def text():
    return summary_table(summarise(made_runs(policies=("smolvla",))))


def test_a_table_says_its_n_seeds_and_scenarios(text):
    assert text.splitlines()[0] == (
        "**smolvla**, scenarios kept for this table: 3 scenarios (window, drawer, push), 3 seeds, 9 base policies, "
        "9 runs per row; n = 20 starts per task, the same for all seeds; 95 % intervals resample scenarios, seeds and "
        "tasks"
    )
    assert "**smolvla**, scenarios on which settings were chosen: 1 scenario (faucet)" in text


def test_a_table_is_markdown_with_a_row_for_each_method(text):
    final = text.split("\n\n")[1].splitlines()
    assert final[0] == (
        "| the user has | method | old tasks | same scene | elsewhere | new task | kept of before | worst single task "
        "| new task against plain |"
    )
    assert final[1] == "|---" * 9 + "|"
    assert len(final) == 2 + 1 + len(METHODS)
    assert {line.count("|") for line in final} == {10}
    assert any(line.startswith("| all old data | joint training | ") for line in final)
    assert final[2].endswith(" |  |  |  |"), "nothing is kept or lost before fine-tuning"


def columns(rows):
    return [name.strip() for name in summary_table(rows).splitlines()[2].strip("|").split("|")]


def test_a_column_that_no_row_has_is_left_out():
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["window"])
    assert columns(summarise(runs)) == [
        "the user has", "method", "old tasks", "same scene", "elsewhere", "new task", "kept of before",
        "worst single task",
    ]  # fmt: skip
    assert "elsewhere" not in columns(summarise([replace(run, same_scene=run.old_tasks) for run in runs]))
    assert {"same scene", "elsewhere"}.isdisjoint(columns(summarise([replace(run, same_scene=[]) for run in runs])))
    nothing_before = dict.fromkeys(runs[0].base, 0.0)
    without = columns(summarise([replace(run, base=nothing_before) for run in runs]))
    assert {"kept of before", "worst single task"}.isdisjoint(without)


def test_the_base_row_says_what_it_does_blindfolded():
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:2], scenes=["window"])
    blind = dict.fromkeys(runs[0].base, 0.25)
    head, _, base, *methods = summary_table(summarise([replace(run, blind=blind) for run in runs])).splitlines()[2:]
    position = [name.strip() for name in head.split("|")].index("old tasks, blindfolded")
    assert base.split("|")[position].startswith(" 0.25 [")
    assert {line.split("|")[position].strip() for line in methods} == {""}


TIERS = [
    ("everything", 0, 9000),
    ("frames", 0, 100),
    ("rollouts", 10, 0),
    ("frames", 0, 20),
    ("instructions", 0, 0),
    ("rollouts", 3, 4321),
    ("nothing", 0, 0),
    ("frames", 0, 1),
]


def test_rows_are_in_the_order_of_what_the_user_has_then_of_methods():
    (made,) = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["window"])
    runs = [
        replace(
            made,
            method=method,
            label=method,
            tier=tier,
            rollouts=rollouts,
            anchors=replace(made.anchors, frames=frames, all_frames=tier == "everything"),
        )
        for tier, rollouts, frames in TIERS
        for method in ("b", "a")
    ]
    rows = [line.split(" | ")[:2] for line in summary_table(summarise(runs)).splitlines()[4:]]
    assert rows[0] == ["| ", "before fine-tuning"]
    said = ["", "instructions", "3 rollouts per task", "10 rollouts per task", "1 frame", "20 frames", "100 frames"]
    assert [row[0].strip("| ") for row in rows[1:]] == [has for has in [*said, "all old data"] for _ in "ba"]
    assert [row[1] for row in rows[1:]] == ["b", "a"] * 8


def test_what_the_policy_sees_makes_tables_of_its_own():
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["window"])
    seen = [replace(run, view="seen", base=dict.fromkeys(run.base, 0.5)) for run in runs]
    told, other = summary_table(summarise([*runs, *seen])).split("\n\n**")
    assert "| before fine-tuning | 0.50 [" in other
    assert "| before fine-tuning | 0.50 [" not in told
    assert other.startswith("smolvla, object only in the picture**, scenarios kept for this table: 1 scenario (window)")


@pytest.mark.parametrize(
    ("by_seed", "said"),
    [(True, "n = 20 starts x 3 seeds per task, each seed with its own"), (False, "n = 20 starts per task, the same")],
)
def test_a_table_says_whether_seeds_share_starts_and_that_they_are_resampled(by_seed, said):
    runs = with_episodes(made_runs(policies=("smolvla",), methods=METHODS[:2]), starts_by_seed=by_seed)
    line = summary_table(summarise(runs)).splitlines()[0]
    assert said in line
    assert line.endswith("95 % intervals resample scenarios, seeds, tasks and starts")


def test_a_label_cannot_break_the_table():
    runs = [replace(run, label="a | b\nc") for run in made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1])]
    assert "| no old frames | a \\| b c |" in summary_table(summarise(runs))


def test_sequences_are_a_table_too():
    lines = sequence_table(summarise_sequences(made_sequences())).splitlines()
    assert {line.count("|") for line in lines[2:]} == {8}
    assert lines[2].startswith("| method | the user has per old task | NBT, all tasks |")


def test_a_sequence_says_its_frames_per_task():
    runs = made_sequences(seeds=(0,))
    assert {run.anchors.frames for run in runs if run.method == "er"} == {200}  # of ten tasks before the last
    assert "| replay | 20 frames | " in sequence_table(summarise_sequences(runs))


def test_numbers_are_short_and_never_a_negative_zero():
    assert [number(v) for v in (0.957, -0.2, -0.001, 0.0)] == ["0.96", "−0.20", "0.00", "0.00"]
    assert format_estimate(Estimate(0.9, 0.85, 0.94)) == "0.90 [0.85, 0.94]"
    assert format_estimate(Estimate(0.0, None, None)) == "0.00"
    assert format_estimate(None) == "-"


def said_of_knobs(*knobs):
    """The line below a table of a method for each list of (value, scenarios on which it was chosen)."""
    runs = [
        replace(run, label=label, method=label, knob=Knob("--craft.x", value, swept_on))
        for label, values in zip("ABCDEF", knobs, strict=False)
        for value, swept_on in values
        for run in made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1], scenes=["window"])
    ]
    return summary_table(summarise(runs)).split("\n\n")[2:]


def test_a_table_says_where_each_setting_in_brackets_was_chosen():
    chosen, alone, swept = [("1", ["faucet", "handle"])], [("3", [])], [("1", []), ("10", [])]
    assert said_of_knobs(chosen, alone, swept, alone) == [
        "Settings in brackets: chosen on faucet, handle (A); default or given (B, D); several tried here (C)."
    ]


def test_a_table_without_such_settings_says_nothing_of_them():
    runs = made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:2], scenes=["window"])
    assert "brackets" not in summary_table(summarise(runs))


def test_a_table_of_sequences_says_it_too():
    runs = [replace(run, knob=Knob("--craft.x", "1", ["faucet"])) for run in made_sequences(seeds=(0,))]
    said = sequence_table(summarise_sequences(runs)).splitlines()[-1]
    assert said == "Settings in brackets: chosen on faucet (plain fine-tuning, replay, CRaFT)."


def test_a_swept_setting_is_named():
    assert name_of("L2-SP", Knob("--craft.l2sp_weight", "0.01", [])) == "L2-SP (l2sp_weight=0.01)"
