"""Base policies as files of weights: what costs most is trained once, and travels.

Weights are rounded to half precision when base training ends, whether they are kept or not. So a policy that comes from
a file is the one that was trained, to the bit, and takes two bytes per parameter.
"""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from lerobot_craft.anchors.files import write_atomically
from lerobot_craft.errors import CraftError

WEIGHTS = "model.safetensors"
_METADATA = {"format": "pt"}  # transformers wants to know


def round_weights(checkpoint: Path) -> None:
    """Round the weights of a checkpoint to what half precision can hold; their type stays."""
    weights = load_file(checkpoint / WEIGHTS)
    save_file(
        {name: _halved(value).to(value.dtype) for name, value in weights.items()}, checkpoint / WEIGHTS, _METADATA
    )


def keep(checkpoint: Path, file: Path) -> None:
    """Write the weights of a checkpoint to a file, in half precision."""
    file.parent.mkdir(parents=True, exist_ok=True)
    halved = {name: _halved(value) for name, value in load_file(checkpoint / WEIGHTS).items()}
    write_atomically(file, save(halved, _METADATA))


def restore(start: Path, file: Path, checkpoint: Path) -> None:
    """Make a checkpoint of a policy that has learned nothing yet and of the weights of a file.

    Args:
        start: The policy as it was made.
        file: From `keep`.
        checkpoint: Where to put the trained one.

    Raises:
        CraftError: The file is damaged, or has other weights than the policy.
    """
    try:
        untrained, kept = load_file(start / WEIGHTS), load_file(file)
    except SafetensorError as error:
        raise CraftError(f"{file} is damaged ({error}): remove it, and the base policy is trained") from error
    if {name: value.shape for name, value in untrained.items()} != {name: value.shape for name, value in kept.items()}:
        raise CraftError(f"{file} holds the weights of another policy: remove it, and the base policy is trained")
    shutil.copytree(start, checkpoint)
    weights = {name: value.to(untrained[name].dtype) for name, value in kept.items()}
    save_file(weights, checkpoint / WEIGHTS, _METADATA)


def _halved(value: Tensor) -> Tensor:
    return value.to(torch.float16) if value.is_floating_point() else value
