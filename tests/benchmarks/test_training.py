import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training.py"
SMALL = ["--width=64", "--depth=3", "--image_size=64", "--anchors=6", "--batch=2", "--repeats=1"]


@pytest.fixture
def measured(tmp_path, capsys):
    """Function from groups of variants to the report and what was printed."""

    def run(groups):
        main = runpy.run_path(str(SCRIPT))["main"]
        main([*SMALL, f"--groups={groups}", f"--output_dir={tmp_path}"])
        (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("training-*.json"))
        (saved,) = (path.read_text() for path in tmp_path.glob("training-*.md"))
        printed = capsys.readouterr().out
        assert saved in printed
        return {(row["name"], row["k"]): row for row in report["rows"]}, report, printed

    return run


@pytest.mark.slow  # half a minute; test_parity.py steps the same runs in the quick suite
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's profiler warns once
def test_it_runs_and_says_what_every_mode_costs(measured):
    rows, report, printed = measured("modes,teachers,engines")
    plain, hidden, token = (rows[name, 1] for name in ("plain fine-tuning", "hidden, layer -2", "token_ce"))
    assert plain["operations_ratio"] == 1
    assert plain["peak_bytes_beyond_plain"] == 0
    assert 1 < hidden["operations_ratio"] < token["operations_ratio"], "it ends early and sees no action tokens"
    assert token["operations_ratio"] == pytest.approx(2, abs=0.1), "as many anchors as samples, the same pass"
    between = rows["token_ce", 5]["operations_ratio"]
    assert between - 1 == pytest.approx((token["operations_ratio"] - 1) / 5, abs=0.01)
    gradient = token["outcome"]["retention_gradient_bytes"]
    assert gradient == 4 * report["parameters"]
    assert token["peak_bytes_beyond_plain"] >= gradient
    assert {row["outcome"]["steps"] for (_, k), row in rows.items() if k == 1} == {4}, "compared after the same steps"
    assert report["hidden_against_token_ce"]["step_k1_by_operations"] > 1
    assert "| hidden, layer -2 | 5 | " in printed


@pytest.mark.slow  # opens twenty runs
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_compares_layers_losses_and_teachers(measured):
    rows, _, _ = measured("modes,layers,teachers")
    copy = rows["hidden, layer -2, online teacher: frozen copy", 1]
    cached, lora = rows["hidden, layer -2", 1], rows["LoRA, hidden, layer -2, online teacher: adapter off", 1]
    assert copy["outcome"]["retention_loss"] == pytest.approx(cached["outcome"]["retention_loss"], rel=1e-3)
    assert copy["operations_ratio"] > cached["operations_ratio"], "the teacher is asked anew"
    assert "frozen copy of the teacher" in copy["outcome"]["held_bytes"]
    assert "frozen copy of the teacher" not in lora["outcome"]["held_bytes"]
