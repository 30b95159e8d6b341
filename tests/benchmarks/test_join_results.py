import dataclasses
import runpy
from pathlib import Path

from lerobot_craft.evaluation.results import read_results, write_results

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
TIERS = RESULTS / "bench-smolvla-seen-five-tiers-2026-11-18.json"
CONTROLS = RESULTS / "bench-smolvla-seen-five-controls-2026-11-18.json"


def joined(tmp_path, *arguments):
    main = runpy.run_path(str(ROOT / "benchmarks" / "join_results.py"))["main"]
    output = tmp_path / "joined.json"
    return main([*arguments, f"--output={output}"]), output


def test_a_run_of_several_files_is_taken_once_from_the_first(tmp_path, capsys):
    code, output = joined(tmp_path, str(TIERS), str(CONTROLS), "--replace=outputs/seen=elsewhere")
    assert code == 0
    first, second, both = (read_results(path) for path in (TIERS, CONTROLS, output))
    plain = [run for run in second.runs if run.method == "naive"]
    assert len(plain) == 3
    assert len(both.runs) == len(first.runs) + len(second.runs) - len(plain)
    assert [run.after_episodes for run in both.runs[: len(first.runs)]] == [run.after_episodes for run in first.runs]
    assert "elsewhere/cells" in both.runs[0].command
    assert "outputs/seen" not in output.read_text()
    assert "fixed multiplier" in capsys.readouterr().out


def test_the_first_file_wins(tmp_path):
    first = read_results(TIERS)
    slower = [dataclasses.replace(run, train_seconds=run.train_seconds + 1) for run in first.runs]
    write_results(tmp_path / "slower.json", dataclasses.replace(first, runs=slower))
    _, output = joined(tmp_path, str(TIERS), str(tmp_path / "slower.json"))
    assert [run.train_seconds for run in read_results(output).runs] == [run.train_seconds for run in first.runs]


def test_a_file_of_something_else_ends_in_a_sentence(tmp_path, capsys):
    other = tmp_path / "other.json"
    other.write_text("{}")
    code, output = joined(tmp_path, str(other))
    assert code == 1
    assert str(other) in capsys.readouterr().err
    assert not output.exists()
