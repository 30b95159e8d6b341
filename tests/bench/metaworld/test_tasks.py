import pytest

from lerobot_craft.bench.metaworld.tasks import TASKS, find_task
from lerobot_craft.errors import CraftError


def test_instructions_are_short_and_tell_tasks_apart():
    instructions = [task.instruction for task in TASKS.values()]
    assert len(set(instructions)) == len(instructions)
    assert all(len(instruction.split()) <= 7 for instruction in instructions)


def test_tasks_are_listed_under_their_own_name_and_end():
    assert all(name == task.name and task.max_steps <= 150 for name, task in TASKS.items())


def test_tasks_of_one_scene_share_all_of_it():
    for task in TASKS.values():
        assert all(other.scene is task.scene for other in TASKS.values() if other.scene.name == task.scene.name)


def test_an_unknown_task_is_refused_with_those_there_are():
    with pytest.raises(CraftError, match=r"no Meta-World task 'fly'.*faucet-open"):
        find_task("fly")
