"""Frames are read in batches: those of lerobot to the bit, whichever way they are read."""

import threading

import pytest
import torch

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.lerobot_api.preload import Pictures, Samples
from lerobot_craft.lerobot_api.reading import read_batches
from tests.lerobot_api.test_preload import CONFIGS, exact, make_odd_dataset
from tests.lerobot_api.test_preload_columns import picture, stand_in

CAMERA = "observation.images.top"


def read_frames(dataset, indices, num_workers=0, batch_size=32):
    """One dataset's frames, dealt into batches."""
    indices = list(indices)
    batches = [(0, indices[start : start + batch_size]) for start in range(0, len(indices), batch_size)]
    return read_batches([dataset], batches, num_workers)


def test_a_batch_is_what_lerobot_train_would_draw(dataset, root, config):
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.datasets.factory import make_dataset

    cfg = TrainPipelineConfig(dataset=DatasetConfig(repo_id="local/drawers", root=str(root)), policy=config)
    rows = [0, 71, 13, 5]
    theirs = next(iter(torch.utils.data.DataLoader(torch.utils.data.Subset(make_dataset(cfg), rows), batch_size=4)))
    (ours,) = read_frames(dataset, rows)
    assert ours[CAMERA].dtype == torch.uint8
    ours[CAMERA] = ours[CAMERA].to(torch.float32) / 255.0  # as lerobot-train does before the preprocessor
    assert sorted(ours) == sorted(theirs)
    assert ours.pop("task") == theirs.pop("task")
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    assert ours["observation.state"].shape == (4, 2, 4)
    assert ours["action"].shape == (4, 8, 4)


def test_videos_are_read_as_uint8(video_root):
    dataset = open_dataset("local/film", video_root)
    (batch,) = read_frames(dataset, [3, 20])
    assert batch[CAMERA].dtype == torch.uint8
    assert batch[CAMERA].shape == (2, 3, 64, 64)
    assert not torch.equal(batch[CAMERA][0], batch[CAMERA][1])


def test_frames_come_in_the_order_asked(dataset):
    rows = [40, 3, 3, 71, 0, 12, 25]
    batches = list(read_frames(dataset, rows, batch_size=3))
    assert [len(batch["task"]) for batch in batches] == [3, 3, 1]
    assert torch.cat([batch["index"] for batch in batches]).tolist() == rows
    assert list(read_frames(dataset, [])) == []


class Watched:
    """A dataset that tells who reads it and when."""

    def __init__(self, dataset):
        self.dataset, self.meta = dataset, dataset.meta
        self.ahead, self.too_far = threading.Event(), threading.Event()
        self.read = []

    def __getitem__(self, row):
        self.read.append((row, threading.current_thread().name))
        if len(self.read) == 6:
            self.ahead.set()
        if len(self.read) == 7:
            self.too_far.set()
        return self.dataset[row]


def test_reading_goes_on_while_the_caller_computes(dataset):
    watched = Watched(dataset)
    batches = read_frames(watched, range(14), batch_size=2)
    next(batches)
    assert watched.ahead.wait(timeout=30), "nothing was read ahead"
    assert not watched.too_far.wait(timeout=0.5), "two batches ahead are enough"
    batches.close()
    assert not any(thread.name.startswith("read_batches") for thread in threading.enumerate())


def test_an_error_while_reading_reaches_the_caller(dataset):
    with pytest.raises(IndexError):
        list(read_frames(dataset, [0, 1_000_000], batch_size=1))


@pytest.fixture(scope="module")
def roots(root, tmp_path_factory):
    return {"images": root, "odd": make_odd_dataset(tmp_path_factory.mktemp("datasets") / "odd")}


def by_lerobot(dataset, rows, monkeypatch):
    """As they come from lerobot alone, whose images are floats in datasets of images."""
    with monkeypatch.context() as patched:
        patched.setattr("lerobot_craft.lerobot_api.reading._FEWEST_FRAMES", 10**9)
        return list(read_frames(dataset, rows))


def seen(batches):
    return [{name: exact(value) for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("policy", CONFIGS)
@pytest.mark.parametrize("kind", ["images", "odd"])
def test_columns_give_what_lerobot_gives(kind, policy, roots, monkeypatch):
    dataset = open_dataset(f"local/{kind}", roots[kind], policy_config=CONFIGS[policy]())
    rows = torch.randint(len(dataset), (70,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = by_lerobot(dataset, rows, monkeypatch)
    read = count_reads(dataset, monkeypatch)
    assert seen(read_frames(dataset, rows)) == seen(expected)
    assert 0 < len(read) < 20, "lerobot was asked for those that are compared, and no others"


def count_reads(dataset, monkeypatch):
    read, stock = [], type(dataset.reader).get_item

    def counted(reader, row):
        read.append(row)
        return stock(reader, row)

    monkeypatch.setattr(type(dataset.reader), "get_item", counted)
    return read


@pytest.mark.parametrize("limit", [{"_FEWEST_FRAMES": 73}, {"_MOST_READ_FOR_ONE": 0}])
def test_few_frames_are_left_to_lerobot(limit, dataset, monkeypatch):
    for name, value in limit.items():
        monkeypatch.setattr(f"lerobot_craft.lerobot_api.reading.{name}", value)
    read = count_reads(dataset, monkeypatch)
    list(read_frames(dataset, range(72)))
    assert read == list(range(72))


def test_samples_that_differ_are_left_to_lerobot(dataset, monkeypatch):
    stock = type(dataset.reader).get_item

    def changed(reader, row):
        item = stock(reader, row)
        return item | {"action": item["action"] + 1}

    monkeypatch.setattr(type(dataset.reader), "get_item", changed)
    batches = list(read_frames(dataset, range(72)))
    assert torch.equal(batches[0]["action"], torch.stack([dataset[row]["action"] for row in range(32)]))


def test_a_batch_that_columns_cannot_give_is_left_to_lerobot(dataset, monkeypatch):
    stock, expected = Samples.__getitems__, by_lerobot(dataset, range(72), monkeypatch)

    def refusing(samples, rows):
        if 40 in rows:
            raise CraftError("an image of another size")
        return stock(samples, rows)

    monkeypatch.setattr(Samples, "__getitems__", refusing)
    assert seen(read_frames(dataset, range(72))) == seen(expected)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([("RGB", 4), ("RGB", 5)], "are not all of one size"),
        ([("I;16", 4), ("I;16", 4)], "are stored as I;16"),
    ],
)
def test_images_of_other_kinds_are_refused(images, said):
    pictures = Pictures(stand_in(camera=[picture(*form) for form in images]), "camera", None)
    rows = torch.tensor([0, 1])
    with pytest.raises(CraftError, match=said):
        pictures.at(rows, torch.zeros_like(rows), torch.ones_like(rows))


@pytest.mark.slow  # each worker process imports lerobot
def test_worker_processes_give_the_same_batches_and_leave_the_global_random_state(dataset):
    rows = [40, 3, 71, 0, 12]
    state = torch.get_rng_state()
    batches = list(read_frames(dataset, rows, num_workers=2, batch_size=2))
    assert torch.equal(torch.get_rng_state(), state)
    for one, two in zip(batches, read_frames(dataset, rows, batch_size=2), strict=True):
        assert one.pop("task") == two.pop("task")
        assert all(torch.equal(one[key], two[key]) for key in two if key != "task")
