from pathlib import Path

import pytest

from lerobot_craft.evaluation.continual import auc, nbt
from tests.examples.reading import LAST, frames_by_dataset, instructions, started_from

OUT = Path("outputs/sequence")
TASKS = ["faucet-open", "faucet-close", "side-handle-press"]
STAGES = [f"after {task}" for task in TASKS]


def test_each_stage_starts_from_the_last_and_keeps_all_before(example, capsys):
    found = example("sequence", "--small")
    for method, evaluation in found.items():
        assert [row.name for row in evaluation.rows] == STAGES
        assert evaluation.tasks == TASKS
        assert evaluation.learned == TASKS[1:]
        assert started_from(OUT / method / "1_faucet-close") == str(OUT / "base" / LAST)
        assert started_from(OUT / method / "2_side-handle-press") == str(OUT / method / "1_faucet-close" / LAST)
    assert instructions(OUT / "anchors/faucet-close").keys() == {"rotate the faucet counter clockwise"}
    assert instructions(OUT / "anchors/side-handle-press").keys() == {
        "rotate the faucet counter clockwise",
        "rotate the faucet clockwise",
    }
    assert frames_by_dataset(OUT / "anchors/side-handle-press").keys() == {f"craft/{task}" for task in TASKS}
    matrix = found["craft"].sequence()
    lost, area = nbt(matrix, matrix.all_tasks), auc(matrix, matrix.all_tasks)
    last_line = capsys.readouterr().out.splitlines()[-1]
    assert last_line == f"| craft | {lost.value:.2f} ± {lost.error:.2f} | {area.value:.2f} ± {area.error:.2f} |"


@pytest.mark.slow  # minutes of training; the test above runs the same stages
@pytest.mark.timeout(1200)
def test_at_full_size_craft_loses_less(example):
    found = example("sequence")
    scores = {
        method: nbt(matrix, matrix.all_tasks).value
        for method, matrix in ((method, evaluation.sequence()) for method, evaluation in found.items())
    }
    assert scores["craft"] <= 0.2
    assert scores["plain"] >= scores["craft"] + 0.3
