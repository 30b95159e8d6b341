import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "surgery.py"


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's profiler and vmap each warn once
def test_it_runs_and_craft_needs_two_gradient_copies(tmp_path, capsys):
    small = ["--vocabulary=2000", "--width=128", "--layers=2", "--batch=2", "--length=8", "--repeats=1"]
    runpy.run_path(str(SCRIPT))["main"]([*small, f"--output_dir={tmp_path}"])
    (result,) = (json.loads(p.read_text()) for p in tmp_path.glob("surgery-*.json"))
    copies = {row["method"]: row["peak_gradient_copies"] for row in result["rows"]}
    assert 1.0 <= copies["weighted sum of the losses"] <= 1.5
    assert copies["CRaFT"] <= 2.05
    assert copies["two clones"] > 2.5
    assert all(row["time_ratio_median"] > 0 for row in result["rows"])
    assert "| CRaFT | " in capsys.readouterr().out
