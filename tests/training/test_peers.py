"""Real ranks, of which one dies or fails; tests/faults/test_dead_rank.py does it to whole runs."""

import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lerobot_craft.errors import CraftError
from lerobot_craft.training import peers
from lerobot_craft.training.peers import RollCall, stops_with_its_peers
from tests.warm_process import free_port

SILENT = "is gone without a word (killed, or out of memory)"
ANSWER = 8.0  # seconds, in place of 10: these ranks have nothing else to do, but there are sixteen on two cores


def work(rank, port, world, fault, dying, busy, directory):
    """Sum over the ranks; the dying one does not get so far. What each ended with goes into a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    peers._ANSWER = ANSWER
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=100))
    try:
        with stops_with_its_peers(directory):
            dist.all_reduce(torch.ones(1))
            if rank == dying and fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == dying:
                raise CraftError("frame 7 cannot\nbe read")
            if rank == busy:
                time.sleep(3 * ANSWER)  # a rollout, or a save
            dist.all_reduce(torch.ones(1000))
    except CraftError as error:
        (directory / str(rank)).write_text(str(error))


class Ranks:
    """Forks of this process, which has imported torch already."""

    def __init__(self, world, fault, dying, directory, busy=None):
        self.world, self.fault, self.dying, self.directory = world, fault, dying, directory
        directory.mkdir()
        fork = multiprocessing.get_context("fork")
        port = free_port()
        self.processes = [
            fork.Process(target=work, args=(rank, port, world, fault, dying, busy, directory)) for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def assert_they_name(self, said):
        """All but the dying one, and nobody else."""
        for process in self.processes:
            process.join(60)
            assert not process.is_alive(), "nobody waits for the dead"
        for rank in {*range(self.world)} - {self.dying}:
            found = (self.directory / str(rank)).read_text()
            assert found == f"{said}, so rank {rank} stops too; no checkpoint had been written yet: start again"
        assert (self.directory / str(self.dying)).exists() == (self.fault == "failed")


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_others_name_the_rank_that_was_killed_and_no_other(tmp_path):
    """Of four, whichever it is: one of the survivors is no neighbour of it in the ring, and notices nothing."""
    runs = [Ranks(4, "killed", dying, tmp_path / f"{dying}") for dying in range(4)]
    for dying, ranks in enumerate(runs):
        ranks.assert_they_name(f"rank {dying} of 4 {SILENT}")


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_others_say_what_the_rank_that_failed_said(tmp_path):
    """Also rank 0, whose process holds the store of last words."""
    runs = [Ranks(3, "failed", dying, tmp_path / f"{dying}") for dying in range(2)]
    for dying, ranks in enumerate(runs):
        ranks.assert_they_name(f"rank {dying} of 3 stopped: frame 7 cannot be read")


@pytest.mark.slow  # waits for longer than ranks may take to answer
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("busy", [0, 2, 3])
def test_a_rank_that_is_busy_with_something_long_is_not_taken_for_dead(busy, tmp_path):
    """It learns of the death when it is done, from a store that may have left by then."""
    ranks = Ranks(5, "killed", 1, tmp_path / "run", busy)
    ranks.assert_they_name(f"rank 1 of 5 {SILENT}")


def roll_call(store, ranks, living, monkeypatch, answer=1.0):
    """What each living rank finds when the first of them asks; the ranks are threads here."""
    monkeypatch.setattr(peers, "_ANSWER", answer)
    calls = {rank: RollCall(store, rank, ranks) for rank in living}
    first, *others = living
    found = {first: calls[first].ask()}
    return found | {rank: calls[rank].ask() for rank in others}


def test_many_silent_ranks_have_one_deadline_together(monkeypatch):
    began = time.monotonic()
    found = roll_call(dist.HashStore(), 12, [3, 7], monkeypatch, answer=2.0)
    assert time.monotonic() - began < 3 * 2.0, "ten silent ranks, one after the other, would be 20 s"
    silent = {rank: None for rank in range(12) if rank not in (3, 7)}
    assert found == {3: silent, 7: silent}


def test_where_all_answer_nobody_is_named(monkeypatch):
    found = roll_call(dist.HashStore(), 3, [0, 1, 2], monkeypatch)
    assert found == {0: {}, 1: {}, 2: {}}
    monkeypatch.setattr(peers, "world_size", lambda: 3)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    said = peers._sentence({}, RuntimeError("[gloo/pair.cc:1]\nTimed out"), Path())
    assert said.startswith(
        "all 3 ranks live, but a connection between them broke ([gloo/pair.cc:1] Timed out), so rank"
    )


class Closing:
    """A store that is gone after so many looks into it."""

    def __init__(self, store, looks):
        self._store, self._looks = store, looks
        self.set, self.get = store.set, store.get

    def clone(self):
        return self

    def check(self, keys):
        self._looks -= 1
        if self._looks < 0:
            raise dist.DistNetworkError("Broken pipe")
        return self._store.check(keys)


@pytest.mark.parametrize(("heard", "gone"), [((), {0: None}), ((0,), {2: None})])
def test_a_store_that_closes_was_rank_0s_unless_that_one_has_answered(heard, gone, monkeypatch):
    store = dist.HashStore()
    store.set(peers._key("asked"), "")
    for rank in heard:
        store.set(peers._key("here", rank), "")
    monkeypatch.setattr(peers, "_LOOK", 0.01)
    monkeypatch.setattr(peers, "_ANSWER", 60.0)
    call = RollCall(Closing(store, 5), 1, 3)
    call._thread.join(30)
    assert call.ask() == gone


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(peers, "_LOOK", 0.01)
    monkeypatch.setattr(peers, "_LONGEST", 0.5)
    unplugged = Closing(dist.HashStore(), 0)
    monkeypatch.setattr(unplugged, "check", lambda keys: released.wait(60) and Closing.check(unplugged, keys))
    call = RollCall(unplugged, 1, 3)
    assert call.ask() == {0: None}
    released.set()
    call._thread.join(30)
    assert not call._thread.is_alive()


def test_a_run_that_ends_well_leaves_nobody_behind():
    call = RollCall(dist.HashStore(), 0, 2)
    call.end()
    assert not call._thread.is_alive()


def test_a_process_alone_has_no_peers():
    with pytest.raises(RuntimeError, match="gloo"), stops_with_its_peers(Path()):
        raise RuntimeError("gloo")
