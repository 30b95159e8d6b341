import json
import runpy
from pathlib import Path

import pytest

from lerobot_craft.cli.bench import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fresh_demonstrations.py"
ONE_DEMONSTRATION = [
    *("--policy=pi0_fast", "--scenario=reach", "--methods=naive", "--anchors=0", "--seeds=0", "--episodes=1"),
    *("--old_episodes=1", "--new_episodes=1", "--base_steps=1", "--steps=60", "--batch_size=16"),
    *("--learning_rate=3e-3", "--jobs=1"),
]


@pytest.mark.timeout(300)
def test_a_run_that_learned_its_demonstration_by_heart_is_found_out(tmp_path, capsys):
    assert run([*ONE_DEMONSTRATION, f"--output_dir={tmp_path / 'bench'}"]) == 0
    (cell,) = (tmp_path / "bench" / "cells").glob("run-*")
    runpy.run_path(str(SCRIPT))["main"]([str(cell), "--frames=64", "--episodes=3", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("fresh-demonstrations-*.json"))
    (row,) = report["runs"]
    assert (row["cell"], row["task"], row["steps"], row["n_episodes"]) == (cell.name, "reach-blue", 60, 1)
    assert 0 < row["loss_on_its_demonstrations"] < 0.8 * row["loss_on_fresh_ones"]
    assert f"| {cell.name} | 60 | {row['loss_on_its_demonstrations']:.3f} | " in capsys.readouterr().out


def test_what_is_no_finished_run_is_refused_before_anything_is_measured(tmp_path, capsys):
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"]([str(tmp_path / "nowhere")])
    assert "nowhere is no finished run of `craft bench`: give directories run-*" in capsys.readouterr().err
