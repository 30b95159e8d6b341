import pytest

from lerobot_craft.cli.bench import run
from lerobot_craft.errors import CraftError

SMALL = ["--scenario=window,drawer", "--methods=naive,er", "--anchors=20", "--seeds=0,1"]


def test_each_cell_is_listed_with_its_number_and_command(tmp_path, capsys):
    assert run([*SMALL, f"--output_dir={tmp_path}", "--list-cells"]) == 0
    lines = capsys.readouterr().out.splitlines()
    # Two scenarios: demonstrations, two bases, and two methods on each base.
    assert len(lines) == 2 * (1 + 2 + 4)
    number, command, name = lines[5].split("\t")
    assert (number, name) == ("5", "base drawer-smolvla-seed1")
    assert command == f"craft bench {' '.join(SMALL)} --output_dir={tmp_path} --cell=5"
    assert not list(tmp_path.iterdir())


def test_the_list_is_the_same_for_all_machines(tmp_path, capsys):
    def listed(place):
        run([*SMALL, f"--output_dir={tmp_path / place}", "--list_cells"])
        return capsys.readouterr().out.replace(place, "")

    assert listed("here") == listed("there")


def test_a_cell_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CraftError, match="--cell=14: this bench has the cells 0 to 13"):
        run([*SMALL, f"--output_dir={tmp_path}", "--cell=14"])


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
