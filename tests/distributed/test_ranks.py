"""What ranks agree on, and how long they wait for each other. Forks: nothing has to be imported again."""

import multiprocessing
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lerobot_craft.anchors.build import Ranks
from lerobot_craft.core.ranks import main_decides, main_says
from lerobot_craft.lerobot_api.train_parts import make_accelerator
from tests.warm_process import free_port

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def on_two_ranks(function, *arguments):
    """Call `function(rank, *arguments)` in two processes that a launcher could have started; both must return."""
    launch = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_rank, args=(rank, launch, function, arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in processes] == [0, 0]


def _rank(rank, launch, function, arguments):
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ |= launch | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    function(rank, *arguments)
    dist.barrier()  # a rank that left early would break the other's connection
    dist.destroy_process_group()


def waits():
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options._timeout


def joined(rank, how):
    if how == "train":
        make_accelerator(SimpleNamespace(policy=SimpleNamespace(device="cpu")))
    else:
        assert Ranks.joined(cpu=True) == Ranks(rank, 2)
    assert waits() == timedelta(hours=2)


@pytest.mark.parametrize("how", ["train", "cache build"])
def test_ranks_wait_for_one_that_is_at_something_long(how):
    on_two_ranks(joined, how)


def decided(rank, directory):
    """Each has a directory of its own, as if the file had come to one of two machines only."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for number, of_main in enumerate((True, False)):
        mine = directory / f"{number}" / f"{rank}"
        mine.mkdir(parents=True)
        if of_main == (rank == 0):
            (mine / "file").touch()
        assert (mine / "file").exists() == (of_main == (rank == 0))
        assert main_decides((mine / "file").exists) == of_main
    assert main_decides(lambda: rank == 0 or pytest.fail("only the main rank is asked"))
    for text in ("drawer öffnen", ""):
        assert main_says(lambda text=text: text if rank == 0 else pytest.fail("only the main rank is asked")) == text


def test_the_main_rank_decides_for_both(tmp_path):
    on_two_ranks(decided, tmp_path)


def test_a_process_alone_decides_for_itself():
    assert main_decides(lambda: True)
    assert not main_decides(lambda: False)
    assert main_says(lambda: "open") == "open"
