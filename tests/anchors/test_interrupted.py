"""A build that is stopped goes on where it stopped, and work may be shared: the cache is the same, byte for byte."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from lerobot_craft.anchors.build import Ranks, build_cache, is_finished, prepare
from lerobot_craft.anchors.manifest import finished_shards
from lerobot_craft.anchors.recipe import DatasetFlags, DocumentsBuild
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import write_checksum
from tests.anchors.test_build import contents


class StoppedError(Exception):
    pass


def stop_after(anchors):
    """Progress that ends the build once so many anchors are done."""
    done = 0

    def progress(count):
        nonlocal done
        done += count
        if done >= anchors:
            raise StoppedError

    return progress


@pytest.fixture
def job(anchor_data, teachers, opened_once, monkeypatch, tmp_path):
    monkeypatch.setattr("lerobot_craft.anchors.build.open_dataset", opened_once)
    config = DocumentsBuild(
        output_dir=tmp_path / "unused",
        old_dataset=DatasetFlags("local/old", str(anchor_data / "old")),
        new_dataset=DatasetFlags("local/new", str(anchor_data / "new")),
        num_anchors=30,
        batch_size=4,
        shard_size=6,
        anchor_source="both",
        retention_mode="action",
    )
    return prepare(config, teachers("smolvla"))


@pytest.fixture
def whole(job, tmp_path):
    build_cache(job, tmp_path / "whole", ranks=Ranks())
    return contents(tmp_path / "whole")


def test_row_i_is_anchor_i_of_the_plan(job, whole, tmp_path):
    rows = AnchorStore.open(tmp_path / "whole").take(torch.arange(30))
    for column in ("frame", "dataset", "instruction", "cross"):
        assert rows[column].tolist() == getattr(job.plan, column).tolist()


@pytest.mark.parametrize("anchors", [1, 13, 30])
def test_an_interrupted_build_goes_on_where_it_stopped(anchors, job, whole, tmp_path):
    directory = tmp_path / "cache"
    with pytest.raises(StoppedError):
        build_cache(job, directory, ranks=Ranks(), progress=stop_after(anchors))
    with pytest.raises(CraftError, match=r"unfinished.*again"):
        AnchorStore.open(directory)
    kept = sum(record.rows for record in finished_shards(directory).values())
    counted = []
    build_cache(job, directory, ranks=Ranks(), progress=counted.append)
    assert counted[0] == kept if kept else counted
    assert sum(counted) == 30
    assert contents(directory) == whole


def test_a_damaged_or_unmarked_shard_of_an_unfinished_build_is_made_again(job, whole, tmp_path):
    directory = tmp_path / "cache"
    with pytest.raises(StoppedError):
        build_cache(job, directory, ranks=Ranks(), progress=stop_after(25))
    shards = sorted(directory.glob("shard-*.safetensors"))
    assert len(shards) >= 2
    shards[0].write_bytes(shards[0].read_bytes()[:-1] + b"\0")
    shards[1].with_suffix(".sha256").unlink()
    build_cache(job, directory, ranks=Ranks())
    assert contents(directory) == whole


def test_an_unfinished_build_with_other_settings_is_not_continued(job, tmp_path):
    directory = tmp_path / "cache"
    with pytest.raises(StoppedError):
        build_cache(job, directory, ranks=Ranks(), progress=stop_after(7))
    other = dataclasses.replace(job, batch_size=5)
    with pytest.raises(CraftError, match=r"unfinished build with other settings \(batch_size differ\)"):
        build_cache(other, directory, ranks=Ranks())


def test_a_directory_with_other_files_is_left_alone(job, tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(CraftError, match="not empty"):
        build_cache(job, tmp_path, ranks=Ranks())
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_a_build_that_was_killed_at_its_first_write_can_be_started(job, whole, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / ".build.json.tmp").write_text("{")
    build_cache(job, tmp_path / "cache", ranks=Ranks())
    assert contents(tmp_path / "cache") == whole


def test_two_ranks_make_the_same_cache(job, whole, checkpoints, tmp_path):
    from lerobot_craft.anchors.teacher import load_teacher

    barrier = threading.Barrier(2, timeout=60)

    class ThreadRanks(Ranks):
        def wait(self):
            barrier.wait()

    second = dataclasses.replace(job, teacher=load_teacher(checkpoints("smolvla")))  # forwards are not thread-safe
    directory = tmp_path / "cache"
    counted = ([], [])
    peer = threading.Thread(
        target=build_cache, args=(second, directory), kwargs={"ranks": ThreadRanks(1, 2), "progress": counted[1].append}
    )
    peer.start()
    build_cache(job, directory, ranks=ThreadRanks(0, 2), progress=counted[0].append)
    peer.join()
    assert (sum(counted[0]), sum(counted[1])) == (18, 12)  # shards 0, 2, 4 and 1, 3
    assert contents(directory) == whole


def command(anchor_data, checkpoint, directory):
    return [
        "cache",
        "build",
        f"--policy.path={checkpoint}",
        "--dataset.repo_id=local/old",
        f"--dataset.root={anchor_data / 'old'}",
        "--new_dataset.repo_id=local/new",
        f"--new_dataset.root={anchor_data / 'new'}",
        "--num_samples=30",
        "--batch_size=4",
        "--shard_size=6",
        "--anchor_source=both",
        "--retention_mode=action",
        f"--output_dir={directory}",
    ]


@pytest.mark.slow  # starts processes that import lerobot; in-process siblings above
@pytest.mark.timeout(600)
def test_a_killed_process_is_continued_by_the_next(anchor_data, checkpoints, whole, tmp_path):
    directory = tmp_path / "cache"
    line = [sys.executable, "-m", "lerobot_craft", *command(anchor_data, checkpoints("smolvla"), directory)]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(directory.glob("shard-*.sha256")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run(line, check=True, capture_output=True)
    assert contents(directory) == whole


@pytest.mark.slow  # two processes that import lerobot; `test_two_ranks_make_the_same_cache` is its short form
@pytest.mark.timeout(600)
def test_accelerate_launch_makes_the_same_cache(anchor_data, checkpoints, whole, tmp_path):
    directory = tmp_path / "cache"
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "-m", "lerobot_craft"]
    line = [*launch, *command(anchor_data, checkpoints("smolvla"), directory)]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert contents(directory) == whole


def test_a_build_that_was_killed_after_its_manifest_is_cleared_up_by_the_next(job, whole, tmp_path):
    directory = shutil.copytree(tmp_path / "whole", tmp_path / "cache")
    (directory / "build.json").write_text("{}")
    write_checksum(directory / "shard-00001.safetensors")
    assert is_finished(job, directory)
    assert contents(directory) == whole
