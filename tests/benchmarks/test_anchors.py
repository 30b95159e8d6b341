import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "anchors.py"


@pytest.mark.slow  # half a minute; tests/anchors builds every kind in the quick suite
def test_it_runs_and_says_what_every_kind_costs(tmp_path, capsys):
    small = ["--width=64", "--depth=2", "--image_size=64", "--anchors=18", "--batch=6", "--repeats=1"]
    runpy.run_path(str(SCRIPT))["main"]([*small, f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("anchors-*.json"))
    pi0_fast, smolvla = report["results"]
    kinds = {row["kind"]: row for row in pi0_fast["rows"]}
    assert kinds["hidden, pooled"]["target_bytes"] < kinds["hidden, per token"]["target_bytes"]
    assert kinds["token_ce"]["bytes_against_token_level"] == 1
    assert {row["kind"] for row in smolvla["rows"]} == set(kinds) - {"token_ce"}
    assert all(row["anchors_per_second"] > 0 for row in pi0_fast["rows"] + smolvla["rows"])
    assert "| hidden, pooled | " in capsys.readouterr().out
