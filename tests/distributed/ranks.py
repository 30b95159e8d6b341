"""Runs a function on several gloo processes of this machine."""

import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(functions, world, tmp_path):
    """Call each `function(rank, world)` in the same `world` processes; an assertion that fails in one fails the test.

    A function starts without a process group, so that it can compute a single-process reference first, and must call
    `join_ranks` to get one.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # inherited: the ranks share this machine's cores
    mp.spawn(_main, args=(functions, world, f"file://{tmp_path}/rendezvous"), nprocs=world)


def join_ranks(rank, world):
    dist.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=rank, world_size=world)


def _main(rank, functions, world, rendezvous):
    torch.set_num_threads(1)
    for number, function in enumerate(functions):
        os.environ["RENDEZVOUS"] = f"{rendezvous}_{number}"
        function(rank, world)
        dist.barrier()  # a rank that left early would break the others' connections
        dist.destroy_process_group()
