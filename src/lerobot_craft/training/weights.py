"""Weights that are not simply a module's parameters: spread over the ranks, or with float32 copies.

`--craft.shard=true` spreads a policy's parameters over the ranks (FSDP2). `--craft.master_weights` makes, saves and
restores float32 copies of bfloat16 weights.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lerobot_craft.core.parameters import MasterWeights, Sharded, like, replace_parameters, whole
from lerobot_craft.core.ranks import find_divergence
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.train_steps import read_optimizer_state
from lerobot_craft.training.config import CraftConfig


def check_sharding(cfg: Any, craft: CraftConfig, accelerator: Any) -> None:
    """Refuse what a sharded policy cannot do, before anything slow happens.

    Raises:
        CraftError: It names the flag, and what to do instead.
    """
    reasons = {
        "needs --craft.enabled=true (--craft.method=naive is plain fine-tuning): without it this is lerobot-train": (
            not craft.enabled
        ),
        "spreads a policy over several processes, and this is one: start them with `accelerate launch`": (
            accelerator.num_processes == 1
        ),
        "does not know --peft: adapters are small enough for every device, so leave out one of the two": (
            cfg.peft is not None
        ),
        "cannot roll out within training, where one process acts alone: give --env_eval_freq=0, and run lerobot-eval "
        "on the checkpoints": cfg.env is not None and cfg.env_eval_freq > 0,
        "does not know --policy.compile_model: compiled code would not gather the parts. Leave out one of the two": (
            bool(getattr(cfg.policy, "compile_model", False))
        ),
        "does not upload at the end: give --policy.push_to_hub=false, and --save_checkpoint_to_hub=true or upload the "
        "last checkpoint yourself": cfg.policy.push_to_hub,
    }
    for reason, holds in reasons.items():
        if holds:
            raise CraftError(f"--craft.shard {reason}")


def shard_policy(policy: nn.Module, optimizer: torch.optim.Optimizer, accelerator: Any) -> Sharded:
    """Spread a policy over all ranks and make its optimizer move the parts.

    Raises:
        CraftError: The ranks do not start from the same weights; sharded, nobody could tell any more.
    """
    before = dict(policy.named_parameters())
    if found := find_divergence(before):
        raise CraftError(
            f"before the first step, rank {found.ranks[0]} of {accelerator.num_processes} holds other weights than the "
            f"others (first: {found.first}): give every machine the same checkpoint and the same library versions"
        )
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    sharded = Sharded(policy, mesh)
    after = dict(policy.named_parameters())
    replace_parameters(optimizer, {before[name]: after[name] for name in before})
    return sharded


def gather_states(policy: nn.Module, optimizer: Any, *, keep: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """States of the policy and of its optimizer with whole tensors, as one process would have them; a collective.

    Args:
        policy: Its parameters are sharded.
        optimizer: So is its state.
        keep: Whether this rank needs the result (on the CPU); the others only take part.
    """
    state = optimizer.state_dict()
    moments = {
        index: {name: gathered(value, keep) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    once: dict[int, Any] = {}  # a weight with two names is gathered once, and is still one
    weights: dict[str, Any] = {}
    for name, value in policy.state_dict(keep_vars=True).items():
        if id(value) not in once:
            once[id(value)] = gathered(value, keep)
        weights[name] = once[id(value)]
    return weights, {"state": moments, "param_groups": state["param_groups"]}


def read_sharded_optimizer(directory: Path, optimizer: torch.optim.Optimizer) -> None:
    """The state of a checkpoint, which one process could have written too, spread over the ranks."""
    read_optimizer_state(directory, _Spreading(optimizer))


class _Spreading:
    """Stands in for an optimizer where lerobot reads its state: each rank keeps its part of every tensor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        parameters: list[Tensor] = [p for group in self._optimizer.param_groups for p in group["params"]]
        for index, values in saved["state"].items():
            saved["state"][index] = {name: like(value, parameters[index]) for name, value in values.items()}
        self._optimizer.load_state_dict(saved)


def gathered(value: Any, keep: bool) -> Any:
    """The whole of a sharded tensor, as a copy on the CPU of the rank that keeps it; a collective."""
    tensor = whole(value)
    if not isinstance(tensor, Tensor):
        return tensor
    # A copy: what is gathered may be a view of something larger, which safetensors does not take.
    return tensor.detach().to("cpu", copy=True) if keep else None


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
