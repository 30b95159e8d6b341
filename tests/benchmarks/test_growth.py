import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "growth.py"


@pytest.fixture
def growth():
    return runpy.run_path(str(SCRIPT))


def test_old_tasks_are_said_in_words_that_the_tokenizer_knows(growth):
    known = {word for task in growth["instructions"](3) for word in task.split()} | {"red", "button"}
    assert len(set(growth["instructions"](12))) == 12
    assert {word for task in growth["instructions"](12) for word in task.split()} == known


@pytest.mark.slow  # twenty runs, four of them commands of their own
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's profiler warns once
def test_it_runs_and_arithmetic_is_flat_where_it_should_be(growth, tmp_path, capsys):
    small = ["--depth=2", "--image_size=56", "--batch=2", "--repeats=1", "--steps=1", "--launched_steps=6"]
    growth["main"]([*small, f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("growth-*.json"))
    operations = {(row["what"], row["value"]): row.get("operations_ratio") for row in report["rows"]}
    for what in ("anchors", "old tasks"):
        values = [ratio for (name, _), ratio in operations.items() if name == what]
        assert len(values) == 3
        assert values == pytest.approx([values[0]] * 3, rel=0.02)
    sizes = [row["parameters"] for row in report["rows"] if row["what"] == "width"]
    assert sizes == sorted(sizes)
    assert [row["value"] for row in report["rows"] if row["what"] == "processes"] == [1, 2]
    assert all(row["ratio_median"] > 0 for row in report["rows"])
    assert "| processes | 2 | " in capsys.readouterr().out
