"""Opening and listing real LeRobotDatasets, written by lerobot itself."""

import json
import shutil

import numpy as np
import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import (
    dataset_fingerprint,
    frame_table,
    instructions,
    open_dataset,
)
from lerobot_craft.tiny.make import make_local_dataset
from tests.lerobot_api.conftest import TASKS
from tests.lerobot_api.test_reading import read_frames


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def copied(root, tmp_path):
    return shutil.copytree(root, tmp_path / "copy")


def edit_json(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_the_table_says_where_every_frame_belongs(dataset):
    table = frame_table(dataset)
    assert len(table) == len(dataset) == 72
    for row in range(len(dataset)):
        item = dataset.get_raw_item(row)
        assert (table.task[row], table.episode[row]) == (item["task_index"], item["episode_index"])
        assert table.position[row] == item["frame_index"]
    assert sorted(set(table.length.tolist())) == [11, 12, 13]
    assert (np.bincount(table.episode)[table.episode] == table.length).all()


def test_a_choice_of_episodes_has_its_own_rows(root):
    dataset = open_dataset("local/drawers", root, episodes=[4, 1])
    table = frame_table(dataset)
    assert np.unique(table.episode).tolist() == [1, 4]
    (batch,) = read_frames(dataset, np.arange(len(table)), batch_size=100)
    assert batch["episode_index"].tolist() == table.episode.tolist()
    assert batch["frame_index"].tolist() == table.position.tolist()


def test_a_table_of_tasks_that_lacks_an_instruction_is_named(root, tmp_path):
    import pandas as pd

    copy = copied(root, tmp_path)
    tasks = pd.read_parquet(copy / "meta" / "tasks.parquet")
    tasks.iloc[:-1].to_parquet(copy / "meta" / "tasks.parquet")
    last = len(tasks) - 1
    with pytest.raises(CraftError, match=rf"has task_index {last}, and meta/tasks\.parquet lists {last} "):
        frame_table(open_dataset("local/drawers", copy))


@pytest.mark.parametrize("lost", ["meta/tasks.parquet", "meta/episodes"])
def test_metadata_that_are_missing_are_named_and_the_network_is_not(root, tmp_path, lost):
    copy = copied(root, tmp_path)
    shutil.rmtree(copy / lost) if (copy / lost).is_dir() else (copy / lost).unlink()
    with pytest.raises(CraftError, match=f"is incomplete: {lost}/? is missing"):
        open_dataset("local/drawers", copy)


def test_the_table_needs_no_pictures(video_root, tmp_path):
    root = copied(video_root, tmp_path)
    for video in root.rglob("*.mp4"):
        video.write_bytes(b"")
    assert len(frame_table(open_dataset("local/film", root))) == 25


def test_instructions_are_what_task_indices_point_into(dataset):
    assert instructions(dataset.meta) == TASKS
    (batch,) = read_frames(dataset, [0, 20, 40], batch_size=3)
    assert batch["task"] == [TASKS[index] for index in batch["task_index"]]


def test_the_fingerprint_is_of_the_content(dataset, root, config, tmp_path):
    fingerprint = dataset_fingerprint(dataset)
    copy = copied(root, tmp_path)
    assert dataset_fingerprint(open_dataset("other/name", copy)) == fingerprint
    dataset.meta.stats["action"]["mean"] += 1  # in memory only, as lerobot's ImageNet statistics are
    assert dataset_fingerprint(dataset) == fingerprint
    dataset.meta.stats["action"]["mean"] -= 1
    edit_json(copy / "meta" / "stats.json", lambda stats: stats["action"]["mean"].__setitem__(0, 0.125))
    assert dataset_fingerprint(open_dataset("local/drawers", copy)) != fingerprint


@pytest.mark.parametrize("changes", [{"tasks": ["open the door", TASKS[1]]}, {"frames_per_episode": 13}, {"seed": 1}])
def test_another_dataset_has_another_fingerprint(dataset, tmp_path, changes):
    root = make_local_dataset(tmp_path / "drawers", **{"tasks": TASKS, **changes})
    assert dataset_fingerprint(open_dataset("local/drawers", root)) != dataset_fingerprint(dataset)


def test_a_missing_dataset_is_refused_and_nothing_is_made(tmp_path):
    with pytest.raises(CraftError, match=r"no meta/info\.json.* dataset\.root"):
        open_dataset("local/nothing", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_an_unknown_name_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("lerobot.datasets.dataset_metadata.HF_LEROBOT_HOME", tmp_path)
    with pytest.raises(CraftError, match=r"local/nothing cannot be read .* dataset\.root"):
        open_dataset("local/nothing")


@pytest.mark.parametrize("pattern", ["data/**/*.parquet", "videos/**/*.mp4"])
def test_an_incomplete_dataset_is_refused_without_asking_the_hub(video_root, tmp_path, monkeypatch, pattern):
    root = copied(video_root, tmp_path)
    next(root.glob(pattern)).unlink()
    calls = []
    monkeypatch.setattr("lerobot.datasets.lerobot_dataset.get_safe_version", lambda *args: calls.append(args))
    with pytest.raises(CraftError, match=r"incomplete: (data|videos)/.* is missing.*dataset\.root"):
        open_dataset("local/film", root)
    assert calls == []


@pytest.mark.parametrize("file", ["meta/info.json", "meta/stats.json", "data/chunk-000/file-000.parquet"])
def test_an_unreadable_dataset_is_refused(root, tmp_path, file):
    copy = copied(root, tmp_path)
    (copy / file).write_bytes(b"{ not this")
    with pytest.raises(CraftError, match=r"cannot be read from .* dataset\.root"):
        open_dataset("local/drawers", copy)


@pytest.mark.parametrize("episodes", [[0, 6], [-1], []])
def test_episodes_that_are_not_there_are_refused(root, episodes):
    with pytest.raises(CraftError, match=r"episodes 0 to 5.*Mend dataset\.episodes"):
        open_dataset("local/drawers", root, episodes=episodes)
