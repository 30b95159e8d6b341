"""A policy whose parameters are spread over the ranks (FSDP2): `--craft.shard=true`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lerobot_craft.core.divergence import find_divergence
from lerobot_craft.core.sharding import Sharded, like, replace_parameters, whole
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
