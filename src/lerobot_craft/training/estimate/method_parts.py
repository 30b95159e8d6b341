"""What a method adds to a plain step: anchors, more samples, or tensors that it keeps all along."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lerobot_craft.anchors.loader import retained_of
from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.policies import PolicyAdapter, adapter_for, unwrapped
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.estimate.step import Anchoring

_WITH_ANCHORS = ("craft", "lwf")
_FLOAT32 = 4


@dataclass(frozen=True)
class MethodParts:
    """What a method adds.

    Attributes:
        rows: Samples in a batch of the task, or in a micro-batch.
        anchoring: The anchor pass, if there is one.
        manifest: Of the anchors' cache, if it is there already.
        kept: Bytes on the device by what they are, held from the first step to the last.
    """

    rows: int
    anchoring: Anchoring | None = None
    manifest: Manifest | None = None
    kept: dict[str, int] = field(default_factory=dict)


def method_parts(cfg: Any, craft: CraftConfig, policy: nn.Module) -> MethodParts:
    """Of a run's settings; `policy` is laid out, wrapped and frozen as training has it."""
    if not craft.enabled:
        return MethodParts(cfg.batch_size)
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    rows, kept = cfg.batch_size, {}
    if craft.master_weights:
        kept["float32 copies of bfloat16 weights"] = sum(
            _FLOAT32 * parameter.numel() for parameter in trained if parameter.dtype == torch.bfloat16
        )
    if craft.method == "er":
        new = cfg.batch_size * craft.accumulate
        rows = math.ceil((new + round(craft.replay_ratio * new)) / craft.accumulate)
    if craft.method in ("l2sp", "ewc"):
        kept["the weights before fine-tuning"] = sum(parameter.nbytes for parameter in trained)
    if craft.method == "ewc":
        kept["Fisher information"] = sum(_FLOAT32 * parameter.numel() for parameter in trained)
    if craft.method not in _WITH_ANCHORS:
        return MethodParts(rows, kept=kept)
    if craft.teacher == "online" and not hasattr(policy, "disable_adapter"):
        student = unwrapped(policy)
        kept["frozen copy of the teacher"] = sum(t.nbytes for t in (*student.parameters(), *student.buffers()))
    adapter = adapter_for(cfg.policy)
    (retained, manifest), *others = [_retained(own, adapter, unwrapped(policy)) for own in craft.by_mode()]
    loss_type = None if craft.method == "lwf" else craft.loss_type
    anchoring = Anchoring(
        adapter,
        retained,
        loss_type,
        craft.anchor_batch_size or cfg.batch_size,
        tuple(other for other, _ in others),
    )
    return MethodParts(rows, anchoring, manifest, kept)


def _retained(craft: CraftConfig, adapter: PolicyAdapter, policy: nn.Module) -> tuple[Retained, Manifest | None]:
    if craft.method == "lwf":
        return Action(top_k=craft.top_k), None
    directory = craft.anchor_cache_dir
    if craft.teacher == "cache" and directory is not None and (directory / MANIFEST_FILE).exists():
        manifest = Manifest.load(directory)
        return retained_of(manifest, adapter, policy), manifest
    build = craft.build_config(Path(), DatasetFlags(), seed=0)
    return build.retained(adapter, policy).once(), None
