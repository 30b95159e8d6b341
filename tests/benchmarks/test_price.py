import json
import runpy
from pathlib import Path

import pytest

from lerobot_craft.cli.bench import run

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "price.py"
SMALL = [
    *("--scenario=reach", "--methods=naive,craft_memory", "--anchors=20", "--seeds=0", "--episodes=1"),
    *("--old_episodes=2", "--new_episodes=1", "--base_steps=2", "--steps=2", "--batch_size=4", "--jobs=1"),
]


@pytest.mark.timeout(300)
def test_a_method_with_a_memory_is_run_and_its_price_is_measured(tmp_path):
    """The bench gives the base policy a memory by `craft remember`; the price repeats what it trained."""
    assert run([*SMALL, f"--output_dir={tmp_path / 'bench'}"]) == 0
    results = tmp_path / "bench" / "results.json"
    naive, remembered = json.loads(results.read_text())["runs"]
    assert (naive["method"], remembered["method"]) == ("naive", "craft_memory")
    assert remembered["anchors"]["frames"] == 20
    assert "--craft.memory=auto" in remembered["command"]
    assert "old_dataset" not in remembered["command"]
    (record,) = (tmp_path / "bench").glob("cells/run-*craft_memory*/train/run.json")
    assert json.loads(record.read_text())["measured_on"].startswith("measured on 4 real frames kept out of training")
    main = runpy.run_path(str(SCRIPT))["main"]
    main([str(results), "--scenario=reach", "--repeats=1", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("price-*.json"))
    plain, craft = report["rows"]
    assert plain["times_plain"] == 1.0
    assert craft["processor_seconds"][0] > 0
