from dataclasses import replace

import pytest

from lerobot_craft.evaluation.results import Estimate, Knob
from lerobot_craft.evaluation.summary import summarise, summarise_sequences
from lerobot_craft.evaluation.table import format_estimate, name_of, number, sequence_table, summary_table
from tests.evaluation.made_results import METHODS, made_runs, made_sequences


@pytest.fixture(scope="module")
def text():
    return summary_table(summarise(made_runs(policies=("smolvla",))))


def test_a_table_says_its_n_seeds_and_scenarios(text):
    assert text.splitlines()[0] == (
        "**smolvla**, scenarios kept for this table: 3 scenarios (window, drawer, push), 3 seeds, 9 runs per row, "
        "n = 20 episodes per task and run, 95 % intervals"
    )
    assert "**smolvla**, scenarios on which settings were chosen: 1 scenario (faucet)" in text


def test_a_table_is_markdown_with_a_row_for_each_method(text):
    final = text.split("\n\n")[1].splitlines()
    assert final[1] == "|---|---|---|---|---|---|"
    assert len(final) == 2 + 1 + len(METHODS)
    assert {line.count("|") for line in final} == {7}
    assert any(line.startswith("| joint training | all | ") for line in final)


def test_a_label_cannot_break_the_table():
    runs = [replace(run, label="a | b\nc") for run in made_runs(seeds=(0,), policies=("smolvla",), methods=METHODS[:1])]
    assert "| a \\| b c | 0 |" in summary_table(summarise(runs))


def test_sequences_are_a_table_too():
    lines = sequence_table(summarise_sequences(made_sequences())).splitlines()
    assert {line.count("|") for line in lines[2:]} == {8}
    assert lines[2].startswith("| method | old frames per task | NBT, all tasks |")


def test_a_sequence_says_its_frames_per_task():
    runs = made_sequences(seeds=(0,))
    assert {run.anchors.frames for run in runs if run.method == "er"} == {200}  # of ten tasks before the last
    assert "| replay | 20 | " in sequence_table(summarise_sequences(runs))


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
