import json
import runpy
import threading
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parity.py"


def test_both_commands_take_their_steps_in_turns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["parity.py"])
    runpy.run_path(str(SCRIPT))["main"](["--policies=smolvla", "--steps=4", "--batch=2", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("parity-*.json"))
    (result,) = report["results"]
    rows = {row["command"]: row for row in result["rows"]}
    assert rows["craft train --craft.enabled=false"]["against"] == ["lerobot-train", "lerobot-train, again"]
    assert rows["lerobot-train, again"]["against"] == ["lerobot-train"]
    for row in rows.values():
        for clock in ("passed", "of_processor"):
            low, high = row[clock]["ratio_interval"]
            assert 0 < low <= row[clock]["ratio_median"] <= high
    assert "| smolvla | craft train --craft.enabled=false | " in capsys.readouterr().out


def test_the_interval_holds_the_median_as_often_as_it_says():
    interval = runpy.run_path(str(SCRIPT))["interval_of_median"]
    rng = np.random.default_rng(0)
    found = [interval(list(rng.lognormal(size=100))) for _ in range(2000)]
    assert 0.93 < np.mean([low <= 1 <= high for low, high in found]) < 0.98


@pytest.fixture
def turns():
    return runpy.run_path(str(SCRIPT))["Turns"]


def test_only_the_one_whose_turn_it_is_runs(turns):
    ran, before = [], set(threading.enumerate())

    def command(name):
        def steps():
            for step in range(3):
                ran.append((name, step))
                taking.stop_here()

        return steps

    taking = turns({"a": command("a"), "b": command("b")})
    for _ in range(3):
        taking.step("b")
        taking.step("a")
    taking.finish()
    assert ran == [(name, step) for step in range(3) for name in "ba"]
    assert set(threading.enumerate()) <= before


def test_a_command_that_fails_is_not_waited_for(turns):
    def fails():
        raise ValueError("no such flag")

    taking = turns({"a": fails, "b": fails})
    with pytest.raises(ValueError, match="no such flag"):
        taking.step("a")
    with pytest.raises(ValueError, match="no such flag"):
        taking.finish()
