"""The command, with the bench's cells played by a function that finishes at once: real files, real page, real table."""

import base64

import pytest

from lerobot_craft.bench import schedule
from lerobot_craft.bench.cell_files import CellResult, Recorded, begin, finish, result_of
from lerobot_craft.cli import demo
from lerobot_craft.evaluation.results import read_results

PNG = b"\x89PNG\r\n\x1a\nthe picture"
RATES = {"naive": (0, 2), "craft": (1, 2)}  # of two: faucet-open, faucet-close


def outcome(cell):
    if cell.kind == "film":
        for task in cell.shown:
            cell.strip(task).write_bytes(PNG)
        return CellResult(1.0)
    if cell.kind == "demos":
        return CellResult(1.0, recorded=Recorded(200, 4000))
    first, new = RATES[cell.method.name] if cell.kind == "run" else (2, 0)
    successes = {task: [True] * 2 for task in cell.tasks}
    successes |= {"faucet-open": [True] * first + [False] * (2 - first), "faucet-close": [i < new for i in range(2)]}
    return CellResult(2.0, successes=successes, train_seconds=1.0, step_seconds=0.1, command="craft train ...")


@pytest.fixture
def cells_run(monkeypatch):
    """Names of the cells that were run, in order."""
    ran = []

    def ensure(cell, train, wait):
        if (kept := result_of(cell)) is not None:
            return kept
        ran.append(cell.name)
        begin(cell)
        result = outcome(cell)
        finish(cell, result)
        return result

    monkeypatch.setattr(schedule, "ensure", ensure)
    monkeypatch.setattr("lerobot_craft.bench.demo_run.check_machine", lambda: "MuJoCo cannot draw here")
    return ran


def craft_demo(directory, *flags):
    return demo.run([f"--output_dir={directory}", "--quick", "--jobs=1", *flags])


def test_it_ends_with_a_table_a_page_and_three_commands(tmp_path, cells_run, capsys):
    assert craft_demo(tmp_path) == 0
    out = capsys.readouterr().out
    assert "There will be no filmstrips: MuJoCo cannot draw here" in out
    (head,) = (line for line in out.splitlines() if line.startswith("|  "))
    assert head.split("|")[2].strip() == "faucet-open (old)"
    (plain,) = (line for line in out.splitlines() if line.startswith("| plain fine-tuning"))
    assert plain.split("|")[2].strip() == "0.00 [0.00, 0.66]"  # two rollouts
    assert out.count("craft train --policy.path=") == 2
    assert "lerobot-eval" in out
    results = read_results(tmp_path / "results.json")
    assert [run.method for run in results.runs] == ["naive", "craft"]
    assert results.media == []
    assert "CRaFT" in (tmp_path / "report.html").read_text()


def test_after_an_interruption_it_goes_on(tmp_path, cells_run, capsys, monkeypatch):
    real = schedule.ensure

    def interrupted(cell, train, wait):
        if cell.kind == "run" and cell.method.name == "craft":
            raise KeyboardInterrupt
        return real(cell, train, wait)

    with monkeypatch.context() as patch:
        patch.setattr(schedule, "ensure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            craft_demo(tmp_path)
    assert "the same command goes on" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()
    before = list(cells_run)
    assert craft_demo(tmp_path) == 0
    assert before == ["demo", "demo-faucet-close", "demo-smolvla-seed0", "demo-smolvla-naive-seed0"]
    assert cells_run == [*before, "demo-smolvla-craft-0frames-seed0", "demo-smolvla-seed0"]  # and the trial
    assert capsys.readouterr().out.count("(done earlier)") == 4


def test_pictures_come_onto_the_page(tmp_path, cells_run, monkeypatch, capsys):
    monkeypatch.setattr("lerobot_craft.bench.demo_run.check_machine", lambda: None)
    for _ in range(2):  # the second time nothing is filmed again
        assert craft_demo(tmp_path) == 0
    assert cells_run.count("demo-smolvla-naive-seed0") == 2, "the run, and its film"
    first, second = read_results(tmp_path / "results.json").media
    assert first.caption.startswith('"rotate the faucet counter clockwise" (old task)')
    assert second.caption.startswith('"rotate the faucet clockwise" (new task)')
    assert "-naive-" in first.plain
    assert (tmp_path / first.craft).read_bytes() == PNG
    assert (tmp_path / "report.html").read_text().count(base64.b64encode(PNG).decode()) == 6
    assert "[9/9] done in" in capsys.readouterr().out


def test_a_stage_that_fails_is_told(tmp_path, cells_run, monkeypatch, capsys):
    def fail(cell, train, wait):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(schedule, "ensure", fail)
    assert craft_demo(tmp_path) == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()


@pytest.mark.parametrize("wrong", ["--jobs=0", "--fast", "--jobs=many"])
def test_a_wrong_flag_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.run([wrong])
    assert stop.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


@pytest.mark.slow  # it records, trains three times and rolls out: a minute of one core
@pytest.mark.timeout(600)
def test_every_stage_runs(tmp_path, capsys):
    from PIL import Image

    assert craft_demo(tmp_path) == 0
    out = capsys.readouterr().out
    assert "[9/9] done in" in out
    assert "Running rollout" not in out
    results = read_results(tmp_path / "results.json")
    assert {run.method: run.anchors.source for run in results.runs} == {"naive": None, "craft": "cross"}
    for strip in results.media:
        for name in (strip.before, strip.plain, strip.craft):
            picture = Image.open(tmp_path / name)
            assert len(picture.getcolors(maxcolors=10**6)) > 1000  # something is to be seen
