"""Checks that a cache is intact, and that a teacher still reproduces it."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lerobot_craft.anchors.files import Progress
from lerobot_craft.anchors.loader import AnchorBatch, AnchorLoader, open_cache, retained_of
from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.anchors.student_values import student_drift
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import autocast
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.policies import PolicyAdapter, adapter_for, mode
from lerobot_craft.teacher.load import Teacher

logger = logging.getLogger(__name__)

# Drift of a policy from its own cache due to batch shape and padding, relative to the cached values' mean square.
FLOORS = {"float64": 1e-8, "float32": 1e-8, "bfloat16": 1e-3, "float16": 1e-5}
# A squared difference squares the rounding error. A divergence of confident distributions does not: its terms p (log p
# - log q) are rounded at the size of log p, so identical logits give about 1e-8 to 1e-7 nats.
_DIVERGENCE_FLOOR = 1e-6


@dataclass(frozen=True)
class Reproduction:
    """How well a policy reproduces cached values."""

    anchors: int
    largest: float  # drift, relative to the values' scale
    floor: float  # the most that rounding can cause

    @property
    def holds(self) -> bool:
        """Whether the policy reproduces the cached values up to rounding."""
        return self.largest <= self.floor


def reproduce(loader: AnchorLoader, teacher: Teacher, num_anchors: int = 64, batch_size: int = 16) -> Reproduction:
    """Recompute some anchors and compare: 0 up to rounding if teacher, statistics and inputs are unchanged."""
    adapter = adapter_for(teacher.config)
    retained = retained_of(loader.manifest, adapter, teacher.policy)
    chosen = torch.linspace(0, len(loader.store) - 1, min(num_anchors, len(loader.store))).round().long()
    found: list[Tensor] = []
    with torch.no_grad(), mode(teacher.policy, train=adapter.train_mode):
        for indices in chosen.split(batch_size):
            for draw in range(retained.draws):
                anchors = loader.take(indices, draw)
                found.append(relative_deviation(adapter, teacher, anchors, retained).max())
    manifest = loader.manifest
    # torch's max keeps a NaN; Python's max may drop it.
    return Reproduction(
        len(chosen), float(torch.stack(found).max()), floor_of(manifest.autocast or manifest.dtype, adapter, retained)
    )


def floor_of(dtype: str, adapter: PolicyAdapter, retained: Retained) -> float:
    """The relative drift below which a difference counts as rounding."""
    is_divergence = "kl" in retained.loss_types(adapter)
    return max(FLOORS[dtype], _DIVERGENCE_FLOOR) if is_divergence else FLOORS[dtype]


def verify_cache(
    directory: Path, teacher: Teacher | None = None, progress: Progress | None = None
) -> tuple[Manifest, Reproduction | None]:
    """Check the bytes of a cache or memory and, given a teacher, that it still gives the cache's values."""
    fingerprint = None if teacher is None else teacher.fingerprint
    config = None if teacher is None else teacher.config
    if Manifest.load(directory).kind == "memory":
        fingerprint = config = teacher = None  # a memory has no teacher values to recompute
    loader = open_cache(directory, teacher=fingerprint, policy_config=config, progress=progress)
    if teacher is None:
        return loader.manifest, None
    reproduction = reproduce(loader, teacher)
    if not reproduction.holds:
        raise CraftError(
            f"the teacher no longer says what {directory} holds: over {reproduction.anchors} anchors the relative "
            f"drift is up to {reproduction.largest:.2g}, where rounding leaves at most {reproduction.floor:.0e}. "
            "Weights, statistics and tokenizers are the same, so the images, the device or the library versions "
            "differ: build the cache again on this machine"
        )
    return loader.manifest, reproduction


def relative_deviation(adapter: PolicyAdapter, teacher: Teacher, anchors: AnchorBatch, retained: Retained) -> Tensor:
    """Relative drift of each anchor, [B]."""
    batch = policy_batch(anchors.raw, _cameras(anchors), teacher.preprocessor)
    with autocast(teacher.config):
        found = student_drift(adapter, teacher.policy, batch, anchors.columns, retained, draw=anchors.draw).cpu()
    return retained.deviation(found, anchors.columns, adapter)


def _cameras(anchors: AnchorBatch) -> list[str]:
    return [name for name, value in anchors.raw.items() if isinstance(value, Tensor) and value.dtype == torch.uint8]
