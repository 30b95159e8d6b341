"""A checkpoint is whole or absent, whatever stops its save."""

import errno
import os
import resource
import shlex
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import save_file

from lerobot_craft.errors import CraftError
from lerobot_craft.io import files
from lerobot_craft.training import checkpoints
from lerobot_craft.training.checkpoints import (
    clear_leftovers,
    last_checkpoint,
    point_last_at,
    point_last_at_resumed,
    resume_command,
    save_craft_state,
    whole_or_not_at_all,
)
from tests.training.killed_saves import content, save, write


@pytest.fixture
def run(tmp_path):
    """A run with one checkpoint, at step 10."""
    save(tmp_path / "run", "000010", "early")
    return tmp_path / "run"


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_save_gives_the_directory_and_nothing_else(run):
    save(run, "000020", "new")
    assert names(run) == ["000010", "000020", "last"]
    assert content(run / "checkpoints" / "000020") == "new"


def test_nothing_is_visible_before_the_block_ends(run):
    with whole_or_not_at_all(run / "checkpoints" / "000020") as directory:
        write(directory, "new")
        assert directory.parent == run / "checkpoints"
        assert not (run / "checkpoints" / "000020").exists()


@pytest.mark.parametrize("swapped", [True, False])
def test_a_step_that_is_saved_again_replaces_the_former(run, swapped, monkeypatch):
    if not swapped:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    save(run, "000010", "again")
    assert names(run) == ["000010", "last"]
    assert content(run / "checkpoints" / "000010") == "again"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_in_the_block_leaves_the_former_checkpoint(run, error):
    def broken_off():
        with whole_or_not_at_all(run / "checkpoints" / "000010") as directory:
            write(directory, "new")
            raise error

    with pytest.raises(error):
        broken_off()
    assert names(run) == ["000010", "last"]
    assert content(run / "checkpoints" / "000010") == "early"


def test_a_new_name_that_cannot_be_given_brings_the_former_checkpoint_back(run, monkeypatch):
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    with pytest.raises(FileNotFoundError), whole_or_not_at_all(run / "checkpoints" / "000010") as directory:
        monkeypatch.setattr(files, "_sync_tree", lambda _: shutil.rmtree(directory))
    assert names(run) == ["000010", "last"]
    assert content(run / "checkpoints" / "000010") == "early"


def test_everything_is_on_the_disk_before_it_gets_its_name(run, monkeypatch):
    checkpoint_dir = run / "checkpoints" / "000020"
    synced = set()

    def sync(descriptor):
        if not checkpoint_dir.exists():
            synced.add(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", sync)
    save(run, "000020", "new")
    assert {path.stat().st_ino for path in (checkpoint_dir, *checkpoint_dir.rglob("*"))} == synced


def test_clearing_leaves_other_names_alone(run):
    for name in (".git.tmp", "notes", ".000020.tmp", "000030"):
        (run / "checkpoints" / name).mkdir()
    assert clear_leftovers(run) == [run / "checkpoints" / ".000020.tmp"]
    assert names(run) == [".git.tmp", "000010", "000030", "last", "notes"]
    assert clear_leftovers(run / "nowhere") == []


def test_last_is_relative_as_lerobots_own(run):
    save(run, "000020", "new")
    assert (run / "checkpoints" / "last").readlink() == Path("000020")
    moved = run.rename(run.with_name("moved"))
    assert content(moved / "checkpoints" / "last") == "new"


def test_a_link_that_a_killed_run_left_does_not_matter(run):
    (run / "checkpoints" / ".last.tmp").symlink_to("nowhere")
    save(run, "000020", "new")
    assert content(run / "checkpoints" / "last") == "new"


def test_the_last_checkpoint_is_the_highest_step_that_is_whole(run):
    directory = run / "checkpoints"
    assert last_checkpoint(directory) is None
    assert last_checkpoint(run) == directory / "000010"
    save(run, "999990", "new")
    save(run, "1000000", "new")  # as text it would come before the other
    assert last_checkpoint(run) == directory / "1000000"
    (directory / "2000000").mkdir()
    (directory / "3000000").symlink_to("nowhere")
    (directory / ".4000000.tmp").mkdir()
    assert last_checkpoint(run) == directory / "1000000"


def test_the_names_are_lerobots():
    from lerobot.common.train_utils import get_step_checkpoint_dir
    from lerobot.configs.train import TRAIN_CONFIG_NAME
    from lerobot.utils import constants

    assert get_step_checkpoint_dir(Path("run"), 100, 10).parent.name == checkpoints.CHECKPOINTS
    assert constants.LAST_CHECKPOINT_LINK == checkpoints.LAST
    assert checkpoints.TRAIN_CONFIG.parts == (constants.PRETRAINED_MODEL_DIR, TRAIN_CONFIG_NAME)
    assert checkpoints.TRAINING_STEP.parts == (constants.TRAINING_STATE_DIR, constants.TRAINING_STEP)


def test_the_resume_command_survives_a_shell(tmp_path):
    words = shlex.split(resume_command(tmp_path / "my run's" / "000010"))
    assert words[:2] == ["craft", "train"]
    assert words[2] == f"--config_path={tmp_path}/my run's/000010/pretrained_model/train_config.json"
    assert words[3:] == ["--resume=true"]


@contextmanager
def largest_file(size):
    """The system refuses longer files inside the block (EFBIG), as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def too_long_bytes(directory):
    (directory / "big").write_bytes(bytes(10_000))


def too_long_tensors(directory):
    save_file({"weight": np.zeros(10_000)}, directory / "model.safetensors")


def too_long_state(directory):
    save_craft_state(directory, {"history": [0.5] * 10_000})


@pytest.mark.parametrize("write_too_much", [too_long_bytes, too_long_tensors, too_long_state])
def test_a_write_that_the_disk_refuses_says_what_is_left_and_how_to_go_on(run, write_too_much):
    with (
        largest_file(4096),
        pytest.raises(CraftError) as caught,
        whole_or_not_at_all(run / "checkpoints" / "000020") as directory,
    ):
        write_too_much(directory)
    message = str(caught.value)
    assert message.startswith(f"{run / 'checkpoints' / '000020'} could not be saved (File too large; ")
    assert " GB are free" in message
    assert f"The last whole one is {run / 'checkpoints' / '000010'}." in message
    assert "raise `ulimit -f`" in message
    assert message.endswith("\n" + resume_command(run / "checkpoints" / "000010"))
    assert names(run) == ["000010", "last"]


FILL_A_DISK = """
import pathlib, sys, numpy as np
from safetensors.numpy import save_file
from lerobot_craft.training.checkpoints import whole_or_not_at_all
from tests.training.killed_saves import found, save
run = pathlib.Path(sys.argv[1])
save(run, "000010", "early")
try:
    with whole_or_not_at_all(run / "checkpoints" / "000020") as directory:
        save_file({"weight": np.zeros(1_000_000)}, directory / "model.safetensors")
finally:
    print(found(run))
"""


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path):
    # A disk of one megabyte, which goes with the process.
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, 'mount -t tmpfs tmpfs "$1"', "", tmp_path]).returncode
    ):
        pytest.skip("this machine lets nobody mount a small disk")
    done = subprocess.run([*inside, mount, "", tmp_path, sys.executable, FILL_A_DISK], capture_output=True, text=True)
    assert "CraftError" in done.stderr
    assert "No space left on device; 0.00 GB are free" in done.stderr
    assert "free some space and run" in done.stderr
    assert done.stdout == "{'000010': 'early', 'last': 'early'}\n"


@pytest.mark.parametrize("place", ["run/checkpoints/000010", "run/merged/alpha_0.20/pretrained_model"])
@pytest.mark.parametrize(
    ("earlier", "way_on"), [(True, "last whole one is .*000005"), (False, "no earlier one.*another")]
)
def test_the_message_knows_whether_there_is_something_to_go_on_from(tmp_path, place, earlier, way_on):
    if earlier:
        save(tmp_path / "run", "000005", "early")
    saving = whole_or_not_at_all(tmp_path / place)
    with largest_file(4096), pytest.raises(CraftError, match=way_on), saving as directory:
        too_long_bytes(directory)


@pytest.mark.parametrize(
    "fault",
    [SafetensorError("tensors share memory"), ConnectionError(errno.ECONNREFUSED, "refused"), OSError("no route")],
)
def test_a_fault_is_not_dressed_up_as_a_full_disk(run, fault):
    with pytest.raises(type(fault)), whole_or_not_at_all(run / "checkpoints" / "000020"):
        raise fault
    assert names(run) == ["000010", "last"]


def test_last_is_where_a_resumed_run_goes_on_from(run, tmp_path):
    save(run, "000020", "new")
    link = run / "checkpoints" / "last"
    point_last_at(run / "checkpoints" / "000010")  # a kill came before the link was set again
    point_last_at_resumed(run, run / "checkpoints" / "000020")
    assert link.readlink() == Path("000020")
    point_last_at_resumed(run, link)
    assert link.readlink() == Path("000020")
    save(tmp_path / "other", "000030", "another run's")
    point_last_at_resumed(run, tmp_path / "other" / "checkpoints" / "000030")
    assert link.readlink() == Path("000020")


def test_a_directory_in_the_place_of_last_is_refused_and_nothing_is_left(tmp_path):
    """A copy that follows links makes one."""
    checkpoint = tmp_path / "checkpoints" / "000010"
    (checkpoint.with_name("last") / "pretrained_model").mkdir(parents=True)
    checkpoint.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CraftError, match=r"last is a directory and not a link .* Type `rm -r .*last` and resume again"):
        point_last_at(checkpoint)
    assert sorted(tmp_path.rglob("*")) == before
