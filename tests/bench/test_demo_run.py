import pytest

from lerobot_craft.bench import demo_run
from lerobot_craft.bench.cell_plan import plan_cells, plan_runs
from lerobot_craft.bench.compared_methods import METHODS
from lerobot_craft.bench.demo_run import check_machine, demo_settings
from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.scenarios import find_scenario
from lerobot_craft.doctor.check import Need
from lerobot_craft.errors import CraftError


def test_the_new_task_shares_the_scene_of_the_first_old_one():
    scenario = find_scenario(demo_run.SCENARIO)
    assert scenario.pair == (scenario.old[0], scenario.new[0])
    assert scenario.role == "tuning"


@pytest.mark.parametrize("quick", [False, True])
def test_every_stage_is_a_cell_of_the_bench(tmp_path, quick):
    settings = demo_settings(tmp_path, quick=quick)
    assert [cell.kind for cell in plan_cells(settings)][:3] == ["demos", "demos", "base"]
    assert {run.method.name for run in plan_runs(settings)} == {"naive", "craft"}


def test_the_recipe_is_the_bench_s_own(tmp_path):
    runs = [run for run in plan_runs(demo_settings(tmp_path)) if run.method.name == "craft"]
    assert [run.frames for run in runs] == [0]
    assert all(run.method is METHODS["craft"] and run.knob is None for run in runs)


def test_a_machine_that_can_draw_is_fit():
    assert check_machine() is None


def test_without_drawing_it_says_why_and_goes_on(monkeypatch):
    def no_drawing(simulation, side):
        raise CraftError("MuJoCo cannot draw here. Type: apt-get install libegl1")

    monkeypatch.setattr(Simulation, "image", no_drawing)
    assert check_machine() == "MuJoCo cannot draw here. Type: apt-get install libegl1"


def test_without_a_package_it_ends_before_anything_long(monkeypatch):
    absent = {"bench": [Need("mujoco", "", None, False), Need("metaworld", "", "3.0.0", True)]}
    monkeypatch.setattr(demo_run, "needs", lambda extra: absent.get(extra, []))
    with pytest.raises(CraftError, match=r"needs mujoco\. Type: pip install 'lerobot-craft\[bench,smolvla\]'"):
        check_machine()
