import os
from dataclasses import replace

import pytest
import torch

from lerobot_craft.bench import cell_files, cell_run, schedule
from lerobot_craft.bench.cell_files import CellResult, Recorded, begin, finish
from lerobot_craft.cli.bench import run
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import read_results

SMALL = ["--scenario=window,drawer", "--methods=naive,er", "--anchors=20", "--seeds=0,1"]
RECORDED = CellResult(1.0, recorded=Recorded(200, 4000))
PLAYED = CellResult(2.0, train_seconds=1.0, step_seconds=0.1, command="craft train ...")


def test_each_cell_is_listed_with_its_number_and_command(tmp_path, capsys):
    assert run([*SMALL, f"--output_dir={tmp_path}", "--list-cells"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Two scenarios: demonstrations of old and new tasks, two bases with a trial each, and two methods on each base.
    assert len(lines) == 2 * (2 + 2 + 2 + 4)
    number, command, name = lines[19].split("\t")
    assert (number, name) == ("19", "trial drawer-smolvla-seed1")
    assert command == f"craft bench {' '.join(SMALL)} --output_dir={tmp_path} --cell=19"
    assert not list(tmp_path.iterdir())


def test_the_list_is_the_same_for_all_machines(tmp_path, capsys):
    def listed(place):
        run([*SMALL, f"--output_dir={tmp_path / place}", "--list_cells"])
        return capsys.readouterr().out.replace(place, "")

    assert listed("here") == listed("there")


def test_a_cell_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CraftError, match="--cell=20: this bench has the cells 0 to 19"):
        run([*SMALL, f"--output_dir={tmp_path}", "--cell=20"])


@pytest.fixture
def cells_run(monkeypatch):
    """Number of torch's threads and OpenMP's in every cell that was run, by its name; each is finished at once."""
    ran = {}

    def ensure(cell, train, wait=True):
        ran[cell.name] = (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
        result = RECORDED if cell.kind == "demos" else replace(PLAYED, successes={t: [True] for t in cell.tasks})
        begin(cell)
        finish(cell, result)
        return result

    monkeypatch.setattr(schedule, "ensure", ensure)
    monkeypatch.setattr(cell_run, "ensure", ensure)
    return ran


def test_one_cell_has_one_thread_as_those_of_workers_have(tmp_path, cells_run, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert run([*SMALL, f"--output_dir={tmp_path}", "--cell=19"]) == 0
        assert cells_run == {"drawer-smolvla-seed1": (1, "1")}
        assert (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")) == (3, None)
    finally:
        torch.set_num_threads(before)


def test_one_cell_of_another_version_says_that_it_is_run_again(tmp_path, cells_run, monkeypatch, capsys):
    cell = [*SMALL, f"--output_dir={tmp_path}", "--cell=19"]
    assert run(cell) == 0
    assert "again" not in capsys.readouterr().out
    monkeypatch.setattr(cell_files, "__version__", "9.8.7")
    assert run(cell) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("trial drawer-smolvla-seed1 is run again: its result was made by version ")


def test_a_policy_without_instructions_has_a_scenario(tmp_path, cells_run, capsys):
    arguments = ["--policy=act", "--scenario=apart", "--anchors=0,20", "--seeds=0", "--episodes=1"]
    arguments.append(f"--output_dir={tmp_path}")
    assert run([*arguments, "--list-cells"]) == 0
    assert [line.split("\t")[2] for line in capsys.readouterr().out.splitlines()] == [
        "demos apart",
        "demos apart-plate-in",
        "base apart-act-seed0",
        "run apart-act-naive-seed0",
        "run apart-act-er-20frames-seed0",
        "run apart-act-craft-20frames-seed0",
        "trial apart-act-seed0",
    ]
    assert run([*arguments, "--jobs=1"]) == 0
    table = capsys.readouterr().out
    assert "run apart-act-naive-seed0: old 1.00, new 1.00; 2 s" in table  # no word of a scene that is shared
    assert "| 20 frames | CRaFT (initial_lambda=3) | 1.00 [0.34, 1.00] |" in table
    assert all(found.same_scene == [] for found in read_results(tmp_path / "results.json").runs)
    assert "CRaFT" in (tmp_path / "report.html").read_text()


def test_a_sweep_on_a_final_scenario_is_refused(tmp_path):
    with pytest.raises(CraftError, match="--sweep on window"):
        run([*SMALL, f"--output_dir={tmp_path}", "--sweep"])


@pytest.mark.parametrize("wrong", ["--episodes=0", "--seeds=-1", "--anchors=many", "--episode=3"])
def test_a_wrong_flag_is_refused(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        run([*SMALL, wrong])
    assert stop.value.code == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


def test_help_says_how_to_spread_the_work(capsys):
    with pytest.raises(SystemExit) as stop:
        run(["--help"])
    assert stop.value.code == 0
    assert "SLURM_ARRAY_TASK_ID" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--learning_rate=fast", "fast: give a positive number, such as 5e-4"),
        ("--learning_rate=0", "0: give a positive number"),
        ("--learning_rate=inf", "inf: give a positive number"),
        ("--steps=many", "many: give a whole number, at least 1"),
        ("--steps=0", "0: give a whole number, at least 1"),
    ],
)
def test_a_wrong_number_is_answered_with_what_to_give(flag, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run([*SMALL, f"--output_dir={tmp_path}", flag])
    assert said in capsys.readouterr().err
