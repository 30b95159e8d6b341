from pathlib import Path

import pytest

from tests.examples.reading import craft_config, frames_by_dataset, instructions

OUT = Path("outputs/zero_old_data")


def test_every_stage_runs_without_an_old_frame(example, capsys):
    evaluation = example("zero_old_data", "--small")
    assert [row.name for row in evaluation.rows] == ["before", "plain", "CRaFT, no old frame"]
    assert evaluation.tasks == ["reach-red", "handle-press", "reach-blue"]
    assert not (OUT / "old").exists()
    assert frames_by_dataset(OUT / "anchors") == {"craft/new": 14}  # a walk has many anchors, and one frame
    assert instructions(OUT / "anchors") == {"reach for the red target": 12, "press the handle down": 12}
    assert craft_config(OUT / "craft")["old_dataset"]["repo_id"] == ""
    printed = capsys.readouterr().out
    assert "24 from cross (14 frames of craft/new" in printed
    assert "| CRaFT, no old frame |" in printed.rpartition("n = 1 episodes per task")[2]


@pytest.mark.slow  # minutes of training; the test above runs the same stages
@pytest.mark.timeout(1200)
def test_at_full_size_instructions_are_enough(example):
    evaluation = example("zero_old_data")
    before, plain, craft = evaluation.rows
    assert min(before.rate("reach-red"), before.rate("handle-press")) >= 0.8
    assert plain.rate("reach-red") <= 0.3
    assert min(craft.rate(task) for task in evaluation.tasks) >= 0.6
