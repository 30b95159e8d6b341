"""Two runs never share an output directory, and the end of a process, however it comes, sets the directory free."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.training.checkpoints import HOLDER, LOCK, claim_run_dir, make_way
from tests.training.killed_saves import save

# Claims once its standard input closes or has a line, says what came of it, and holds on until it is killed.
CLAIM = """
import os, signal, sys
from pathlib import Path
from lerobot_craft.errors import CraftError
from lerobot_craft.training.checkpoints import claim_run_dir
directory, resume, fork = Path(sys.argv[1]), sys.argv[2] == "resume", "fork" in sys.argv
print("ready", flush=True)
sys.stdin.readline()
try:
    with claim_run_dir(directory, resume=resume):
        if not fork or os.fork() == 0:  # one of the two answers: both at once would mix their letters
            print("claimed", flush=True)
        signal.pause()
except CraftError as error:
    print(error, flush=True)
"""


class Claimant:
    """Another process that claims a directory when told to."""

    def __init__(self, directory, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLAIM, directory, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout.readline() == "ready\n"

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answer(self):
        return self.process.stdout.readline().rstrip("\n")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        with contextlib.suppress(ProcessLookupError):  # it ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def claimants():
    started = []

    def start(*arguments):
        started.append(Claimant(*arguments))
        return started[-1]

    yield start
    for claimant in started:
        claimant.end()


@pytest.fixture
def holder(claimants, tmp_path):
    """Another process that holds the run's directory."""
    claimant = claimants(tmp_path / "run", "fresh")
    claimant.go()
    assert claimant.answer() == "claimed"
    return claimant


def test_a_fresh_run_makes_its_directory(tmp_path):
    with claim_run_dir(tmp_path / "a" / "run", resume=False):
        assert (tmp_path / "a" / "run" / LOCK).is_file()
        (tmp_path / "a" / "run" / "metrics.jsonl").touch()
    assert sorted(path.name for path in (tmp_path / "a" / "run").iterdir()) == [LOCK, "metrics.jsonl"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_in_use_is_refused_and_the_process_named(resume, holder, tmp_path):
    with (
        pytest.raises(CraftError, match=rf"run is in use by process {holder.process.pid} on \S+: .*") as caught,
        claim_run_dir(tmp_path / "run", resume=resume),
    ):
        pass
    assert ("then resume" if resume else "another --output_dir") in str(caught.value)


def test_a_process_cannot_claim_twice(tmp_path):
    with (
        claim_run_dir(tmp_path / "run", resume=False),
        pytest.raises(CraftError, match=f"in use by process {os.getpid()}"),
        claim_run_dir(tmp_path / "run", resume=True),
    ):
        pass


@pytest.mark.parametrize("mode", ["fresh", "resume"])
def test_of_runs_that_start_in_the_same_instant_one_wins(mode, claimants, tmp_path):
    starting = [claimants(tmp_path / "run", mode) for _ in range(4)]
    for claimant in starting:
        claimant.go()
    answers = [claimant.answer() for claimant in starting]
    assert answers.count("claimed") == 1
    assert sum("is in use by" in answer for answer in answers) == 3


def test_a_killed_run_sets_its_directory_free(holder, tmp_path):
    save(tmp_path / "run", "000010", "early")
    holder.kill()
    assert (tmp_path / "run" / HOLDER).exists()
    with claim_run_dir(tmp_path / "run", resume=True):
        assert (tmp_path / "run" / HOLDER).read_text().split()[0] == str(os.getpid())


def test_a_worker_that_outlives_its_run_does_not_hold_the_directory(claimants, tmp_path):
    parent = claimants(tmp_path / "run", "resume", "fork")
    parent.go()
    assert parent.answer() == "claimed"
    parent.kill()
    with claim_run_dir(tmp_path / "run", resume=True):
        os.killpg(parent.process.pid, 0)  # the worker lives: it raises otherwise


def test_a_run_that_was_killed_before_it_wrote_anything_can_be_started_again(holder, tmp_path):
    holder.kill()
    (tmp_path / "run" / f".{HOLDER}.tmp").touch()
    with claim_run_dir(tmp_path / "run", resume=False):
        pass
    assert not (tmp_path / "run").exists()


def test_a_run_that_ends_without_having_written_anything_leaves_no_directory(tmp_path):
    with pytest.raises(ValueError, match="a start-up check"), claim_run_dir(tmp_path / "run", resume=False):
        raise ValueError("a start-up check")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_with_a_run_is_refused_with_the_line_that_goes_on(tmp_path):
    save(tmp_path / "run", "000010", "early")
    with pytest.raises(CraftError, match="holds a run") as caught, claim_run_dir(tmp_path / "run", resume=False):
        pass
    assert str(caught.value).splitlines()[1] == (
        f"craft train --config_path={tmp_path}/run/checkpoints/000010/pretrained_model/train_config.json --resume=true"
    )


def test_a_directory_with_other_files_is_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    for refused in (lambda: make_way(tmp_path), lambda: claim_run_dir(tmp_path, resume=False).__enter__()):
        with pytest.raises(CraftError, match="is not empty and holds no checkpoint"):
            refused()
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


WRITTEN = (
    "metrics.jsonl",
    ".run.json.tmp",
    "lambda_history.csv",
    "checkpoints/.000002.tmp/pretrained_model/model.safetensors",
    "eval/videos_step_000001/pick_0/eval_episode_0.mp4",
    "wandb/offline-run-1/files/output.log",
    "probe_anchors/shard-00000.safetensors",
)


def write(directory, *names):
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(name)


def test_a_run_that_was_killed_before_its_first_checkpoint_is_started_again(holder, tmp_path):
    write(tmp_path / "run", *WRITTEN)
    with pytest.raises(CraftError, match="in use by process"):
        make_way(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    holder.kill()
    make_way(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own", ["notes.txt", "eval/best.mp4", "probe_anchors/notes.txt", "checkpoints/best/model.pt"])
def test_what_a_user_put_there_is_never_removed(own, holder, tmp_path):
    write(tmp_path / "run", *WRITTEN, own)
    holder.kill()
    with pytest.raises(CraftError, match=f"holds no checkpoint to resume from \\({own} is there"):
        make_way(tmp_path / "run")
    kept = [name for name in WRITTEN if not name.startswith("checkpoints/")]
    assert all((tmp_path / "run" / name).exists() for name in (own, *kept))


def test_a_checkpoint_that_was_being_replaced_is_not_lost(holder, tmp_path):
    save(tmp_path / "run", "000010", "early")
    (tmp_path / "run/checkpoints/000010").rename(tmp_path / "run/checkpoints/.000010.old")
    holder.kill()
    with pytest.raises(CraftError, match="holds a run"):
        make_way(tmp_path / "run")
    assert (tmp_path / "run/checkpoints/000010").is_dir()


def test_way_is_made_where_a_killed_run_wrote_nothing(holder, tmp_path):
    with pytest.raises(CraftError, match="in use by process"):
        make_way(tmp_path / "run")
    holder.kill()
    make_way(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    make_way(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def locked_up():
    """A directory that this process may not write into."""
    directory = Path(tempfile.mkdtemp())  # pytest's own are under one that only its owner may enter
    (directory / "run").mkdir()
    (directory / "run").chmod(0o555)
    directory.chmod(0o555)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may write anywhere
    yield directory
    os.seteuid(user)
    directory.chmod(0o755)
    shutil.rmtree(directory)


@pytest.mark.parametrize("name", ["new", "run"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_directory_that_cannot_be_written_is_refused(locked_up, name, resume):
    with pytest.raises(CraftError, match=f"{name}: permission denied"), claim_run_dir(locked_up / name, resume=resume):
        pass


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(CraftError, match="run is a file"), claim_run_dir(tmp_path / "run", resume=False):
        pass
    with (
        pytest.raises(CraftError, match="a part of that path is a file"),
        claim_run_dir(tmp_path / "run" / "x", resume=False),
    ):
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place where no directory can be made")
def test_a_place_where_nothing_can_be_made_is_named_with_its_flag():
    with pytest.raises(CraftError, match=r"^--output_dir=/proc/nope/run: no directory can be made there\."):
        claim_run_dir(Path("/proc/nope/run"), resume=False).__enter__()
