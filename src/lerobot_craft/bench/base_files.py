"""Base policies as weight files: training them is the largest cost, so it is done once and the files are shared.

Base training always ends by rounding to half precision, so a policy from a file is bit-identical to the trained one.
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
_METADATA = {"format": "pt"}  # required by transformers


def round_weights(checkpoint: Path) -> None:
    """Round a checkpoint's weights to half precision; their dtype stays."""
    weights = load_file(checkpoint / WEIGHTS)
    save_file(
        {name: _halved(value).to(value.dtype) for name, value in weights.items()}, checkpoint / WEIGHTS, _METADATA
    )


def keep(checkpoint: Path, file: Path) -> None:
    """Write a checkpoint's weights to a file, in half precision."""
    file.parent.mkdir(parents=True, exist_ok=True)
    halved = {name: _halved(value) for name, value in load_file(checkpoint / WEIGHTS).items()}
    write_atomically(file, save(halved, _METADATA))


def restore(start: Path, file: Path, checkpoint: Path) -> None:
    """Make a checkpoint from an untrained policy and a weight file.

    Args:
        start: The untrained policy.
        file: From `keep`.
        checkpoint: Output directory.

    Raises:
        CraftError: The file is damaged, or does not match the policy.
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
