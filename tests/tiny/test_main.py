"""`python -m lerobot_craft.tiny`: what it makes, what it leaves alone."""

import pytest

import lerobot_craft.tiny.__main__ as tiny_main
from lerobot_craft.anchors.teacher import load_teacher


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "not yet there"
    assert tiny_main.main([f"--output_dir={directory}"]) == 0
    return directory


def contents(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*")}


def test_the_teacher_loads_from_where_it_was_moved_to(made):
    teacher = load_teacher(made / "teacher")
    assert teacher.config.type == "pi0_fast_tiny"
    assert teacher.config.text_tokenizer_name == str(made / "teacher" / "assets" / "text_tokenizer")


def test_the_datasets_hold_the_instructions(made):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    for name, tasks in (("old", tiny_main.OLD_TASKS), ("new", tiny_main.NEW_TASKS)):
        assert set(LeRobotDataset(f"local/{name}", root=made / name).meta.tasks.index) == set(tasks)


def test_nothing_else_is_left_behind(made):
    assert sorted(path.name for path in made.iterdir()) == ["new", "old", "teacher"]


def test_a_second_call_makes_nothing_and_says_where_all_is(made, capsys):
    before = contents(made)
    assert tiny_main.main([f"--output_dir={made}"]) == 0
    assert contents(made) == before
    told = capsys.readouterr().out
    assert f"teacher: {made / 'teacher'} (pi0_fast, random weights)" in told
    assert f"new task: {made / 'new'} (push the blue cube to the left)" in told


def test_a_teacher_of_another_type_stays(made, capsys):
    before = contents(made)
    assert tiny_main.main([f"--output_dir={made}", "--policy=act"]) == 2
    assert "teacher is pi0_fast_tiny, and --policy=act is asked for" in capsys.readouterr().err
    assert contents(made) == before


def test_what_fails_halfway_leaves_nothing_that_looks_whole(tmp_path, monkeypatch):
    def half(root, *_, **__):
        root.mkdir()
        (root / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(tiny_main, "make_local_dataset", half)
    with pytest.raises(OSError, match="disk full"):
        tiny_main.make_all(tmp_path, "pi0_fast")
    assert list(tmp_path.iterdir()) == []
