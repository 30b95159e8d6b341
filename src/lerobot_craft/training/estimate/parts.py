"""What a device and its machine hold beside a plain step: for the method, for sharing a run, and on the host."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from lerobot_craft.anchors.loader import DECODED_BYTES, retained_of
from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.recipe import DatasetFlags, num_anchors
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import PolicyAdapter, adapter_for, unwrapped
from lerobot_craft.training.anchoring.frames_in_memory import KEPT_BYTES
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.estimate.step import Anchoring

Strategy = Literal["ddp", "fsdp"]
DDP_BUCKETS, FSDP_GATHERED = "DDP's buckets", "gathered by FSDP at a time"
_WITH_ANCHORS = ("craft", "lwf")
_FLOAT32 = 4


@dataclass
class EstimateConfig:
    """`--estimate.*`: how many devices share the run, and how the answer is written."""

    # Processes of the run, one on each device.
    world_size: int = 1
    # ddp: every device holds the whole policy | fsdp: weights, gradients and optimizer state are divided.
    strategy: str = "ddp"
    # Print JSON (bytes) in place of the table.
    json: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CraftError(f"--estimate.world_size must be at least 1; got {self.world_size}")
        if self.strategy not in get_args(Strategy):
            raise CraftError(
                f"--estimate.strategy must be one of {', '.join(get_args(Strategy))}; got {self.strategy!r}"
            )
        if self.strategy == "fsdp" and self.world_size == 1:
            raise CraftError(
                "--estimate.strategy=fsdp divides a policy among devices: say how many, --estimate.world_size=8"
            )


@dataclass(frozen=True)
class MethodParts:
    """What a method adds to a plain step.

    Attributes:
        rows: Samples in a batch of the task, or in a micro-batch.
        anchoring: The anchor pass, if there is one.
        manifest: The manifest of the anchor cache, if the cache exists.
        kept: Bytes on the device from the first step to the last, by what they are.
    """

    rows: int
    anchoring: Anchoring | None = None
    manifest: Manifest | None = None
    kept: dict[str, int] = field(default_factory=dict)


def method_parts(cfg: Any, craft: CraftConfig, policy: nn.Module) -> MethodParts:
    """What the method of a run adds; `policy` is wrapped and frozen as in training."""
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


def share(options: EstimateConfig) -> float:
    """The share of weights, gradients and optimizer state that a device holds."""
    return 1 / options.world_size if options.strategy == "fsdp" else 1.0


def shared_parts(options: EstimateConfig, policy: nn.Module) -> dict[str, int]:
    """Bytes that sharing needs on each device, by what they are.

    DDP reduces gradients in buckets of its own, as large as all gradients (lerobot leaves torch's
    `gradient_as_bucket_view` off). FSDP gathers the weights of a block of layers when it needs them, and prefetches the
    next block; gradients are whole before they are divided. What is in no block (embeddings, the output layer) belongs
    to the root and is whole during the pass.
    """
    if options.world_size == 1:
        return {}
    if options.strategy == "ddp":
        return {DDP_BUCKETS: sum(p.nbytes for p in policy.parameters() if p.requires_grad)}
    blocks = [_whole(child) for part in policy.modules() if isinstance(part, nn.ModuleList) for child in part]
    inside = {id(p) for part in policy.modules() if isinstance(part, nn.ModuleList) for p in part.parameters()}
    root = sum(_with_gradient(p) for p in policy.parameters() if id(p) not in inside)
    return {FSDP_GATHERED: root + 2 * max(blocks, default=0)}


def _whole(module: nn.Module) -> int:
    return sum(_with_gradient(parameter) for parameter in module.parameters())


def _with_gradient(parameter: nn.Parameter) -> int:
    return parameter.nbytes * (2 if parameter.requires_grad else 1)


def host_parts(cfg: Any, craft: CraftConfig, parts: MethodParts) -> dict[str, int]:
    """Bytes that a run keeps in the machine's own memory, by what they are; reached once every anchor was visited."""
    pixels = sum(math.prod(feature.shape) for feature in cfg.policy.image_features.values())  # a byte each
    if craft.enabled and craft.method == "er":
        return {"old frames": craft.replay_frames * (pixels * _FLOAT32 + _numbers(cfg))}
    if parts.anchoring is None:
        return {}
    asked = num_anchors(craft.num_anchors, craft.old_frames, parts.anchoring.adapter)
    count = parts.manifest.num_anchors if parts.manifest else asked
    if craft.teacher == "online":
        return {"anchors' frames": min(KEPT_BYTES, count * (pixels + _numbers(cfg)))}
    decoded = count * pixels
    found = {"anchors' decoded images": decoded if decoded <= DECODED_BYTES else 0}
    if parts.manifest is not None:
        found["anchor cache, mapped from disk"] = sum(shard.bytes for shard in parts.manifest.shards)
    return found


def _numbers(cfg: Any) -> int:
    """Bytes of the state and actions of a frame."""
    config = cfg.policy
    steps = len(config.action_delta_indices or [0])
    actions = sum(math.prod(feature.shape) for feature in config.output_features.values())
    state = sum(math.prod(f.shape) for name, f in config.input_features.items() if name not in config.image_features)
    return int(_FLOAT32 * (state + steps * actions))
