import json
import runpy
import threading
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parity.py"


def test_both_commands_take_their_steps_in_turns(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["parity.py"])
    runpy.run_path(str(SCRIPT))["main"](["--policies=smolvla", "--steps=4", "--batch=2", f"--output_dir={tmp_path}"])
    (report,) = (json.loads(path.read_text()) for path in tmp_path.glob("parity-*.json"))
    (result,) = report["results"]
    rows = {row["command"]: row for row in result["rows"]}
    assert rows.keys() == {"lerobot-train", "craft train --craft.enabled=false", "lerobot-train, again"}
    for clock in ("passed", "of_processor"):
        stock = [rows[name][clock]["ratio_median"] for name in ("lerobot-train", "lerobot-train, again")]
        assert sum(stock) == pytest.approx(2), "the two are what ratios are to"
        assert all(row[clock]["seconds_median"] > 0 for row in rows.values())
    assert "| smolvla | craft train --craft.enabled=false | " in capsys.readouterr().out


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
