"""One random stream per rank, saved with each checkpoint and restored on resume.

lerobot 0.6.1 seeds all ranks alike, so the n-th sample of every rank gets the same noise, flow time and dropout, and it
saves only the main rank's state. Here the main rank draws as in lerobot, and every other rank has its own stream.
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
    """Start this rank's own random stream; the main rank keeps its current one."""
    if rank == 0:
        return
    # Hashed, so that rank 1 of seed 0 is unrelated to rank 0 of seed 1.
    digest = hashlib.sha256(f"rank {seed or 0} {rank} {step}".encode()).digest()
    own = int.from_bytes(digest[:4])
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002  # the generator that policies and augmentations use
    torch.manual_seed(own)  # all devices


def gather_streams() -> list[RngState]:
    """The generator states of all ranks; a collective."""
    from accelerate.utils import gather_object
    from lerobot.utils.random_utils import serialize_rng_state

    states: list[RngState] = gather_object([serialize_rng_state()])
    return states


def save_streams(directory: Path, states: Sequence[RngState]) -> None:
    """Write the states of all ranks except the main one, which lerobot writes, into a checkpoint."""
    from safetensors.torch import save_file

    for rank, state in enumerate(states):
        if rank > 0:
            save_file(state, _file(directory, rank))


def restore_stream(directory: Path, rank: int, seed: int | None, step: int) -> None:
    """Restore the generators from a checkpoint; a rank that is not in it starts a new stream."""
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
