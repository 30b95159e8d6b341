"""Runs a function on several gloo processes of this machine."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(function, world, tmp_path, *args):
    """Call `function(rank, world, *args)` in `world` processes; an assertion that fails in one fails the test.

    `function` starts without a process group, so that it can compute a single-process reference first, and must call
    `join_ranks` to get one.
    """
    rendezvous = f"file://{tmp_path}/rendezvous"
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited: the ranks share this machine's cores
    mp.spawn(_main, args=(function, world, rendezvous, args), nprocs=world)


def join_ranks(rank, world):
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world)


def _main(rank, function, world, rendezvous, args):
    torch.set_num_threads(1)
    os.environ["RENDEZVOUS"] = rendezvous
    function(rank, world, *args)
    dist.barrier()  # a rank that left early would break the others' connections
    dist.destroy_process_group()


def free_port():
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
