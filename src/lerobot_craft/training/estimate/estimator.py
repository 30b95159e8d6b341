"""From a run's settings to its estimate."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lerobot_craft.core.master_weights import MasterWeights
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import open_metadata
from lerobot_craft.lerobot_api.input_shapes import input_shapes
from lerobot_craft.lerobot_api.policies import autocast_dtype
from lerobot_craft.lerobot_api.training import make_optimizer
from lerobot_craft.lerobot_api.weightless import check_shapes, weightless_policy, wrap_peft_weightless
from lerobot_craft.policies import unwrapped
from lerobot_craft.training.accumulation import check_accumulation
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.estimate.ledger import Ledger
from lerobot_craft.training.estimate.parts import (
    EstimateConfig,
    MethodParts,
    host_parts,
    method_parts,
    share,
    shared_parts,
)
from lerobot_craft.training.estimate.step import ANCHOR_PASS, TASK_PASS, Step
from lerobot_craft.training.estimate.table import Estimate, make_estimate
from lerobot_craft.training.estimate.weightless import (
    ReadsForTheLog,
    give_tensors,
    run_without_values,
    without_memory,
)
from lerobot_craft.training.methods.registry import make_method

_WHOLE_PARAMETERS = ("l2sp", "ewc", "merge")


def estimate(cfg: Any, craft: CraftConfig, options: EstimateConfig, device: str) -> Estimate:
    """What each device of a run holds at most.

    Args:
        cfg: lerobot's validated `TrainPipelineConfig`.
        craft: `--craft.*`.
        options: `--estimate.*`.
        device: The device of the run; it need not be here.
    """
    if craft.shard:
        options = dataclasses.replace(options, strategy="fsdp")
    if options.strategy == "fsdp" and craft.enabled and craft.method in _WHOLE_PARAMETERS:
        raise CraftError(f"--craft.method={craft.method} needs whole parameters on every device: leave out fsdp")
    check_accumulation(cfg, craft)
    cfg.policy.device = device
    notes: list[str] = []
    meta = _metadata(cfg, notes)
    policy = weightless_policy(cfg.policy, meta, cfg.rename_map)
    path = cfg.policy.pretrained_path
    if path is not None and not cfg.policy.use_peft and not check_shapes(policy, Path(path)):
        notes.append(f"there are no weights in {path}: sizes are those that its config describes")
    policy = wrap_peft_weightless(policy, cfg)
    if craft.enabled:
        make_method(craft).freeze(unwrapped(policy), craft, cfg.policy)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise CraftError("there is nothing to train: every parameter is frozen")
    shapes = input_shapes(cfg.policy, meta, cfg.rename_map)
    parts = method_parts(cfg, craft, policy)
    constant = parts.kept | shared_parts(options, policy)
    ledger = Ledger(run_without_values)
    with warnings.catch_warnings(), without_memory(), ReadsForTheLog(), ledger:
        warnings.simplefilter("ignore")  # a real run will show lerobot's and torch's warnings
        give_tensors(policy)
        step = Step(ledger, policy, _optimizer(cfg, craft, device), shapes, lambda: _autocast(cfg.policy))
        sizes = step.take(parts.rows, parts.anchoring, share(options), craft.accumulate)
    notes += [f"{phase}: not known, because {reason}" for phase, reason in sizes.unknown.items()]
    notes += _arithmetic(sizes.operations, craft.retention_freq)
    notes += _remarks(cfg, craft, options, parts, device)
    title = _title(cfg, craft, options, parts, policy, device)
    return make_estimate(title, sizes, constant, share(options), host_parts(cfg, craft, parts), notes)


def _metadata(cfg: Any, notes: list[str]) -> Any | None:
    try:
        return open_metadata(cfg.dataset.repo_id, cfg.dataset.root, cfg.dataset.revision)
    except CraftError:
        if not cfg.policy.input_features or not cfg.policy.output_features:
            raise
        notes.append(f"the dataset {cfg.dataset.repo_id} is not here: image sizes are those of the policy's config")
        return None


def _optimizer(cfg: Any, craft: CraftConfig, device: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Lerobot's optimizer with the kernels that it will use on the device."""
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    def make(policy: nn.Module) -> torch.optim.Optimizer:
        optimizer, _ = make_optimizer(cfg, policy)
        many_at_once = torch.device(device).type in _get_foreach_kernels_supported_devices()
        for group in optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = many_at_once  # torch decides this by the parameters' device, here the CPU
        if craft.enabled and craft.master_weights:
            MasterWeights(optimizer, policy.named_parameters())
        return optimizer

    return make


def _autocast(config: Any) -> contextlib.AbstractContextManager[Any]:
    name = autocast_dtype(config)
    return contextlib.nullcontext() if name is None else torch.autocast("cpu", dtype=getattr(torch, name))


def _arithmetic(operations: dict[str, int], every: int) -> list[str]:
    """What anchors cost if only arithmetic takes time: 1 + (anchors' operations) / (K x the task's)."""
    task, anchors = operations.get(TASK_PASS), operations.get(ANCHOR_PASS)
    if not task or anchors is None:
        return []
    counted = f"{task / 1e12:,.3g} TFLOP for the task's pass, {anchors / 1e12:,.3g} for the anchors'"
    return [f"arithmetic: {counted}; in the mean {1 + anchors / (every * task):.2f} times that of plain fine-tuning"]


def _remarks(cfg: Any, craft: CraftConfig, options: EstimateConfig, parts: MethodParts, device: str) -> list[str]:
    remarks = []
    if getattr(cfg.policy, "compile_model", False):
        remarks.append("torch.compile changes what is kept for the backward pass: these are the numbers without it")
    if parts.anchoring is not None and craft.retention_freq > 1 and craft.method == "craft":
        remarks.append(f"anchors come at every {craft.retention_freq}th step: in between there is no anchor pass")
    if craft.accumulate > 1:
        remarks.append(
            f"a step has {craft.accumulate} micro-batches: activations, batches and arithmetic are those of one, and "
            "one gradient takes up all of them"
        )
    if getattr(cfg.policy, "pad_language_to", None) == "longest":
        length = cfg.policy.tokenizer_max_length
        remarks.append(f"prompts are reckoned with {length} tokens, the most there can be; shorter ones need less")
    if options.strategy == "fsdp":
        remarks.append("FSDP is reckoned with one block of layers per unit")
    if torch.device(device).type != "cpu":
        remarks.append(
            "activations are those of the CPU's kernels; a GPU's attention and autocast differ in some places"
        )
    return remarks


def _title(
    cfg: Any, craft: CraftConfig, options: EstimateConfig, parts: MethodParts, policy: nn.Module, device: str
) -> str:
    everything = sum(parameter.numel() for parameter in policy.parameters())
    trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    method = craft.method if craft.enabled else "plain fine-tuning"
    if parts.anchoring is not None:
        retained = "+".join(each.mode for each in (parts.anchoring.retained, *parts.anchoring.beside))
        method += f" ({retained}, {parts.anchoring.rows} anchors)"
    devices = "" if options.world_size == 1 else f" x {options.world_size} ({options.strategy})"
    batch = f"batch of {parts.rows}" if craft.accumulate == 1 else f"{craft.accumulate} batches of {parts.rows} a step"
    return (
        f"{cfg.policy.type}: {everything / 1e6:,.1f} M parameters, {trained / 1e6:,.1f} M trained; {method}; "
        f"{batch} on {device}{devices}"
    )
