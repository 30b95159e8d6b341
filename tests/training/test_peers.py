"""Real ranks, of which one dies or fails; tests/faults/test_dead_rank.py does it to whole runs."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lerobot_craft.errors import CraftError
from lerobot_craft.training.peers import stops_with_its_peers
from tests.warm_process import free_port

DYING = 1


def work(rank, port, world, fault, directory):
    """Sum over the ranks; the dying one does not get so far. What each ended with goes into a file."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        with stops_with_its_peers(directory):
            dist.all_reduce(torch.ones(1))
            if rank == DYING and fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == DYING:
                raise CraftError("frame 7 cannot\nbe read")
            dist.all_reduce(torch.ones(1))
    except CraftError as error:
        (directory / str(rank)).write_text(str(error))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "fault", "said"),
    [
        (2, "failed", "rank 1 of 2 stopped: frame 7 cannot be read"),
        pytest.param(
            *(3, "killed", "rank 1 of 3 is gone without a word (killed, or out of memory)"),
            marks=pytest.mark.slow,  # three processes that import torch
        ),
    ],
)
def test_the_others_name_the_rank_that_is_gone(world, fault, said, tmp_path):
    context = mp.spawn(work, args=(free_port(), world, fault, tmp_path), nprocs=world, join=False)
    for process in context.processes:
        process.join(240)
        assert not process.is_alive(), "nobody waits for the dead"
    for rank in {*range(world)} - {DYING}:
        found = (tmp_path / str(rank)).read_text()
        assert found == f"{said}, so rank {rank} stops too; no checkpoint had been written yet: start again"
    assert (tmp_path / str(DYING)).exists() == (fault == "failed")


def test_a_process_alone_has_no_peers():
    with pytest.raises(RuntimeError, match="gloo"), stops_with_its_peers(Path()):
        raise RuntimeError("gloo")
