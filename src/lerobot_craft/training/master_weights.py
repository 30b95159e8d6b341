"""`--craft.master_weights`: float32 copies of bfloat16 weights, made, saved and taken up again."""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lerobot_craft.core.master_weights import MasterWeights
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.sharding import gathered

logger = logging.getLogger(__name__)

MASTER_WEIGHTS = Path("training_state") / "master_weights.safetensors"


def make_masters(
    cfg: Any, craft: CraftConfig, optimizer: torch.optim.Optimizer, policy: nn.Module
) -> MasterWeights | None:
    """The copies, if they were asked for; in a resumed run those of its checkpoint.

    Raises:
        CraftError: No trained weight is bfloat16, or the checkpoint has no copies.
    """
    if not craft.enabled:
        return None
    if not craft.master_weights:
        _warn_of_rounding(optimizer)
        return None
    masters = MasterWeights(optimizer, policy.named_parameters())
    if not masters.copies:
        raise CraftError(
            "--craft.master_weights keeps float32 copies of bfloat16 weights, and this policy trains none: leave it "
            "out, or give --policy.dtype=bfloat16"
        )
    if cfg.resume:
        masters.load(_read(cfg.checkpoint_path, masters))
    logger.info("float32 copies of %d bfloat16 tensors: %.3g MB", len(masters.copies), masters.nbytes / 1e6)
    return masters


def gather_masters(masters: MasterWeights | None, *, keep: bool) -> dict[str, Tensor]:
    """The copies as whole tensors, on the rank that keeps them; a collective where they are sharded."""
    if masters is None:
        return {}
    # One by one: whole, all of them are what did not fit on a device.
    copies = ((name, gathered(copy, keep)) for name, copy in masters.copies.items())
    return {name: copy for name, copy in copies if copy is not None}


def save_masters(directory: Path, copies: dict[str, Tensor]) -> None:
    """Write the copies into a checkpoint."""
    if copies:
        save_file(copies, directory / MASTER_WEIGHTS)


def _read(directory: Path, masters: MasterWeights) -> dict[str, Tensor]:
    path = directory / MASTER_WEIGHTS
    if not path.is_file():
        raise CraftError(
            f"{directory} was saved without --craft.master_weights, so there are no copies to go on with: leave the "
            f"flag as it was, or start a new run with --policy.path={directory / 'pretrained_model'}"
        )
    saved = load_file(path)
    odd = set(saved) ^ set(masters.copies)
    odd |= {name for name, copy in masters.copies.items() if name in saved and saved[name].shape != copy.shape}
    if odd:
        raise CraftError(
            f"{path} does not fit what is trained now ({min(odd)}): resume with the flags of the saved run"
        )
    return saved


def _warn_of_rounding(optimizer: torch.optim.Optimizer) -> None:
    trained: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    rounded = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    rate = max(group.get("initial_lr", group["lr"]) for group in optimizer.param_groups)  # a schedule may begin at 0
    if rounded:
        logger.warning(
            "%.0f %% of the trained weights are bfloat16, where updates below a 512th of a weight are lost to rounding "
            "(learning rate: %.2g); --craft.master_weights=true keeps them (docs/scaling.md)",
            *(100 * rounded / sum(p.numel() for p in trained), rate),
        )
