import json
import runpy
from pathlib import Path

import pytest

from lerobot_craft.cli.bench import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "listening.py"
SMALL = [
    *("--scenario=reach", "--methods=naive,lora", "--anchors=0", "--seeds=0", "--episodes=1", "--old_episodes=1"),
    *("--new_episodes=1", "--base_steps=2", "--steps=2", "--batch_size=2", "--jobs=1"),
]


@pytest.mark.timeout(300)
def test_each_run_with_a_policy_of_its_own_is_listened_to(tmp_path):
    assert run([*SMALL, f"--output_dir={tmp_path / 'bench'}"]) == 0
    main = runpy.run_path(str(SCRIPT))["main"]
    main([str(tmp_path / "bench" / "results.json"), "--frames=4", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("listening-*.json"))
    (row,) = report["runs"]  # LoRA's checkpoint holds an adapter
    assert (row["scenario"], row["method"], row["seed"]) == ("reach", "naive", 0)
    assert set(row["lost"]) == {"reach-red"}
    assert set(row["gone"]) <= {"reach-red"}
    assert set(report["spearman"].values()) == {None}  # one run has no rank


def test_results_without_their_cells_are_refused(tmp_path, capsys):
    stored = SCRIPT.parent / "results" / "bench-smolvla-pane-2026-11-16.json"
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"]([str(stored)])
    assert "none of these runs has its checkpoint any more" in capsys.readouterr().err
