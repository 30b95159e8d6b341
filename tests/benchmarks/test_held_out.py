import json
import runpy
from pathlib import Path

import pytest

from tests.anchor_fixtures import OLD_TASKS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "held_out.py"


@pytest.mark.timeout(300)
def test_a_run_that_learned_its_anchors_by_heart_is_found_out(train_flags, craft_train, tmp_path, capsys):
    cell = tmp_path / "cell"
    held = {
        "craft.enabled": "true",
        "craft.anchor_cache_dir": cell / "anchors",
        "craft.old_instructions": ";".join(OLD_TASKS),
        "craft.num_anchors": 6,
        "craft.anchor_batch_size": 6,
        "craft.walked_states": 0,
        "craft.probe_anchors": 0,
        "policy.optimizer_lr": 3e-3,
        "policy.scheduler_warmup_steps": 0,
    }
    flags = train_flags("pi0_fast", cell / "train", steps=40, batch_size=6, **held)
    assert craft_train(*flags) == 0
    script = runpy.run_path(str(SCRIPT))
    script["main"]([str(cell), "--anchors=12", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("held-out-*.json"))
    (row,) = report["runs"]
    assert (row["cell"], row["anchors"], row["visits_of_each"]) == ("cell", 6, 40)
    assert 0 < row["drift_on_its_anchors"] < 0.8 * row["drift_on_fresh_ones"]
    assert "| cell | 6 | 40.0 | " in capsys.readouterr().out
