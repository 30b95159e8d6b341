import numpy as np
import pytest

from lerobot_craft.bench.metaworld.recording import attempt
from lerobot_craft.bench.metaworld.tasks import TASKS, find_task
from lerobot_craft.bench.scenarios import SCENARIOS, Scenario, find_scenario, trunk_of
from lerobot_craft.errors import CraftError

SINGLE = [s for s in SCENARIOS.values() if len(s.old) == 5 and not s.trunk and s.name != "table"]
TRIO = [scenario for scenario in SCENARIOS.values() if scenario.trunk == "trio"]


def tasks_of(role):
    return {task for scenario in SCENARIOS.values() if scenario.role == role for task in scenario.old + scenario.new}


def test_no_task_is_both_tuned_on_and_shown():
    assert not tasks_of("tuning") & tasks_of("final")
    assert not {find_task(t).scene.name for t in tasks_of("tuning")} & {
        find_task(t).scene.name for t in tasks_of("final")
    }


def test_there_are_two_to_tune_on_and_four_to_show():
    assert [scenario.role for scenario in SINGLE] == ["tuning", "tuning", "final", "final", "final", "final"]


@pytest.mark.parametrize("scenario", SINGLE, ids=lambda scenario: scenario.name)
def test_the_first_old_task_shares_the_scene_of_the_new_one_and_no_other_does(scenario):
    assert scenario.pairs == ((scenario.old[0], *scenario.new),)
    assert scenario.pair == (scenario.old[0], *scenario.new)
    assert len({find_task(task).scene.name for task in scenario.old}) == 5


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=lambda scenario: scenario.name)
def test_every_scenario_names_tasks_that_exist_once(scenario):
    tasks = scenario.old + scenario.new
    assert len(set(tasks)) == len(tasks)
    assert set(tasks) <= set(TASKS)


def test_the_sequence_comes_back_to_scenes_of_the_base_and_of_its_own():
    sequence = SCENARIOS["sequence"]
    assert (len(sequence.old), len(sequence.new)) == (4, 5)
    assert sequence.pairs == (
        ("window-open", "window-close"),
        ("drawer-open", "drawer-close"),
        ("door-lock", "door-unlock"),
    )


def test_three_scenarios_start_from_one_base_and_each_comes_back_to_a_scene_of_it():
    assert [scenario.pair for scenario in TRIO] == [
        ("drawer-open", "drawer-close"),
        ("window-close", "window-open"),
        ("door-lock", "door-unlock"),
    ]
    trunks = [trunk_of(scenario) for scenario in TRIO]
    assert trunks == [Scenario("trio", "final", TRIO[0].old, ("drawer-close", "window-open", "door-unlock"))] * 3


@pytest.mark.parametrize(("trunk", "role", "old"), [("mixed", "tuning", 5), ("ten", "final", 10)])
def test_a_trunk_has_a_new_task_for_something_carried_something_fixed_and_elsewhere(trunk, role, old):
    carried, fixed, elsewhere = (scenario for scenario in SCENARIOS.values() if scenario.trunk == trunk)
    assert {scenario.role for scenario in (carried, fixed, elsewhere)} == {role}
    assert len(carried.old) == old
    for scenario in (carried, fixed):
        assert len(scenario.pairs) == 1
    moved = [_moved(*scenario.pairs[0]) for scenario in (carried, fixed)]
    assert moved[0] > 0.15
    assert elsewhere.pairs == ()


def _moved(*tasks):
    """How far the object is carried, in metres; the lesser of two tasks."""
    return min(np.linalg.norm(np.diff(attempt(task, 0, 0).states[[0, -1], 4:], axis=0)) for task in tasks)


def test_on_the_table_every_old_task_happens_in_the_scene_of_the_new_one():
    table = SCENARIOS["table"]
    assert table.pairs == tuple((old, "lift-purple") for old in table.old)
    assert len(table.old) == 5


def test_a_scenario_without_others_is_its_own_trunk():
    assert trunk_of(SCENARIOS["drawer"]) is SCENARIOS["drawer"]


def test_scenarios_with_other_old_tasks_cannot_share_a_base(monkeypatch):
    other = Scenario("other", "final", old=("drawer-open",), new=("drawer-close",), trunk="trio")
    monkeypatch.setitem(SCENARIOS, "other", other)
    with pytest.raises(CraftError, match="'trio' share base policies, and their old tasks differ"):
        trunk_of(TRIO[0])


def test_one_to_tune_on_has_no_two_tasks_of_a_scene():
    apart = SCENARIOS["apart"]
    tasks = apart.old + apart.new
    assert (apart.pair, apart.pairs) == (None, ())
    assert len({find_task(task).scene.name for task in tasks}) == len(tasks)


def test_a_scenario_of_ones_own_may_have_no_pair():
    assert Scenario("mine", "tuning", old=("dial-turn",), new=("lever-pull",)).pair is None


def test_an_unknown_scenario_is_refused_with_those_there_are():
    with pytest.raises(CraftError, match=r"no scenario 'kitchen'.*faucet.*sequence"):
        find_scenario("kitchen")
