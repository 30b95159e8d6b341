"""The random numbers of each rank: its own stream, saved with each checkpoint and taken up again by a resumed run.

lerobot 0.6.1 seeds all ranks alike, so that the n-th sample of every rank meets the same noise, the same flow time and
the same dropout, and it saves the state of the main rank only. Here the main rank draws as lerobot's does, and every
other one from a stream of its own.
"""

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

RngState = dict[str, Tensor]


def start_stream(seed: int | None, rank: int, step: int = 0) -> None:
    """Give this rank its own random numbers; the main one keeps those that it has."""
    if rank == 0:
        return
    # Hashed, so that rank 1 of seed 0 has nothing in common with rank 0 of seed 1.
    digest = hashlib.sha256(f"rank {seed or 0} {rank} {step}".encode()).digest()
    own = int.from_bytes(digest[:4])
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002  # the generator that policies and augmentations draw from
    torch.manual_seed(own)  # of every device


def gather_streams() -> list[RngState]:
    """Where the generators of every rank stand; a collective."""
    from accelerate.utils import gather_object
    from lerobot.utils.random_utils import serialize_rng_state

    states: list[RngState] = gather_object([serialize_rng_state()])
    return states


def save_streams(directory: Path, states: Sequence[RngState]) -> None:
    """Write the states of all ranks but the main one, whose state lerobot writes itself, into a checkpoint."""
    from safetensors.torch import save_file

    for rank, state in enumerate(states):
        if rank > 0:
            save_file(state, _file(directory, rank))


def restore_stream(directory: Path, rank: int, seed: int | None, step: int) -> None:
    """Set the generators to the state of a checkpoint; a rank that it did not have begins a stream of its own."""
    from lerobot.utils.random_utils import deserialize_rng_state, load_rng_state
    from safetensors.torch import load_file

    if rank == 0:
        load_rng_state(_file(directory, rank).parent)
    elif _file(directory, rank).is_file():
        deserialize_rng_state(load_file(_file(directory, rank)))
    else:
        start_stream(seed, rank, step)


def _file(directory: Path, rank: int) -> Path:
    from lerobot.utils.constants import RNG_STATE, TRAINING_STATE_DIR

    main = Path(directory, TRAINING_STATE_DIR, RNG_STATE)
    return main.with_stem(f"{main.stem}_rank_{rank}") if rank else main
