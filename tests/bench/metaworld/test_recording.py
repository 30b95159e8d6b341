from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from lerobot_craft.bench.metaworld import recording
from lerobot_craft.bench.metaworld.recording import attempt, attempts, record
from lerobot_craft.bench.metaworld.simulation import Simulation
from lerobot_craft.bench.metaworld.tasks import STATE_NAMES, TASKS, find_task, state_names
from lerobot_craft.errors import CraftError

NAMES = ("drawer-close", "reach-red")


def columns(root):
    """All rows of a dataset as lerobot stores them, pictures as bytes."""
    import pyarrow.parquet as pq

    (file,) = (root / "data").rglob("*.parquet")
    return pq.read_table(file).to_pydict()


def contents(root):
    """The bytes of all files, by name."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("data") / "demos", NAMES, 3, seed=5, progress=False)


def test_lerobot_opens_what_was_recorded(recorded):
    from lerobot.datasets import LeRobotDataset

    dataset = LeRobotDataset("craft/demos", root=recorded)
    assert (dataset.num_episodes, dataset.fps) == (6, 80)
    assert dataset.features["observation.state"]["names"] == list(STATE_NAMES)
    frame = dataset[0]
    assert frame["task"] == "close the drawer"
    assert frame["observation.images.top"].shape == (3, 16, 16)
    table = columns(recorded)
    firsts = [episode.index(True) for episode in ([e == i for e in table["episode_index"]] for i in range(6))]
    assert [dataset[i]["task"] for i in firsts] == ["close the drawer", "reach for the red target"] * 3
    states = np.array(table["observation.state"])
    np.testing.assert_allclose(dataset.meta.stats["observation.state"]["mean"], states.mean(0), rtol=1e-4, atol=1e-6)


def test_labels_are_clean_while_the_movement_is_noisy():
    noisy, simulation = attempt("reach-red", 5, 1), Simulation("reach-red")
    # The expert for reaching is a proportional controller that brings the fingers to the target.
    target = np.add(simulation.task.goal, [0, 0, 0.045])
    wanted = np.clip(10 * (target - noisy.states[:, :3]), -1, 1)
    np.testing.assert_allclose(noisy.actions[:, :3], wanted, atol=1e-5)
    way = [simulation.reset(0)]  # without noise
    for _ in noisy.states[1:]:
        simulation.step(simulation.expert())
        way.append(simulation.state())
    apart = np.abs(noisy.states - np.stack(way))[:, :3].max(1)
    assert apart[0] == 0
    assert apart.max() > 0.001


def test_the_dataset_holds_the_attempts_as_they_were(recorded):
    table = columns(recorded)
    first = attempt("drawer-close", 5, 0)
    for name, values in (("observation.state", first.states), ("action", first.actions)):
        np.testing.assert_array_equal(np.array(table[name][: len(values)], np.float32), values)


def test_an_attempt_depends_on_task_seed_and_number_alone():
    again = attempt("reach-red", 5, 2)
    (_, _, third) = attempts("reach-red", 5, range(3))
    np.testing.assert_array_equal(again.states, third.states)
    assert not np.array_equal(attempt("reach-red", 6, 2).states[0], third.states[0])
    assert not np.array_equal(attempt("reach-blue", 5, 2).states[0], third.states[0])


def test_several_processes_record_the_same(recorded, tmp_path):
    other = record(tmp_path / "demos", NAMES, 3, seed=5, jobs=2, progress=False)
    assert columns(other) == columns(recorded)
    assert contents(other) == contents(recorded)


def test_pictures_are_recorded_for_those_who_see(tmp_path):
    from lerobot.datasets import LeRobotDataset

    root = record(tmp_path / "seen", ["drawer-close"], 1, seed=0, view="seen", progress=False)
    dataset = LeRobotDataset("craft/seen", root=root)
    assert dataset.features["observation.state"]["names"] == list(state_names("seen"))
    first, last = dataset[0]["observation.images.top"], dataset[len(dataset) - 1]["observation.images.top"]
    assert first.shape == (3, 64, 64)
    assert first.std() > 0.05
    assert (first != last).any()


def test_embedding_at_once_changes_no_value(monkeypatch, tmp_path):
    found = {"drawer-close": attempts("drawer-close", 0, range(2), "seen")}
    recording.write_dataset(tmp_path / "ours", "craft/x", found, "seen")
    monkeypatch.setattr(recording, "embedding_at_once", nullcontext)
    recording.write_dataset(tmp_path / "stock", "craft/x", found, "seen")
    assert columns(tmp_path / "ours") == columns(tmp_path / "stock")
    for name in ("info.json", "stats.json"):
        assert (tmp_path / "ours/meta" / name).read_text() == (tmp_path / "stock/meta" / name).read_text()


def test_a_place_that_is_taken_is_refused(recorded):
    with pytest.raises(CraftError, match="is there already"):
        record(recorded, NAMES, 1, seed=0, progress=False)


def test_failed_attempts_are_left_out(monkeypatch, tmp_path):
    tried = []

    def every_third_fails(task, seed, numbers, view):
        tried.extend(numbers)
        return [None if number % 3 == 0 else number for number in numbers]

    monkeypatch.setattr(recording, "attempts", every_third_fails)
    kept = {}
    monkeypatch.setattr(recording, "write_dataset", lambda root, repo_id, found, *_: (root.mkdir(), kept.update(found)))
    record(tmp_path / "demos", ["reach-red"], 8, seed=0, progress=False)
    assert kept["reach-red"] == [1, 2, 4, 5, 7, 8, 10, 11]
    assert tried == list(range(15))


def test_an_expert_that_fails_too_often_is_refused(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "hasty", replace(find_task("reach-red"), name="hasty", max_steps=3))
    with pytest.raises(CraftError, match=r"expert of hasty succeeded in 0 of 5 attempts"):
        record(tmp_path / "demos", ["hasty"], 2, seed=0, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_recording_leaves_nothing(monkeypatch, tmp_path):
    def interrupt(found, repo_id, *_):
        (found / "data").mkdir(parents=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(recording, "write_dataset", interrupt)
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path / "demos", ["reach-red"], 1, seed=0, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_behind_does_not_disturb(tmp_path):
    (tmp_path / "demos.partial" / "data").mkdir(parents=True)
    record(tmp_path / "demos", ["reach-red"], 1, seed=0, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]
