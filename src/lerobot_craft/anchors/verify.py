"""What a cache holds, whether it is intact, and whether a teacher still reproduces it."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lerobot_craft.anchors.build import INPUT
from lerobot_craft.anchors.loader import AnchorBatch, AnchorLoader, open_cache, retained_of
from lerobot_craft.anchors.manifest import Manifest, source_notes
from lerobot_craft.anchors.retained import FIXED, OWN_ERROR, Retained, mode_named
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.anchors.teacher import Teacher
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import Progress
from lerobot_craft.io.text import human_bytes
from lerobot_craft.lerobot_api.pretrained import autocast
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.policies import PolicyAdapter, adapter_for, mode

_BOOKKEEPING = ("instruction", "cross", "dataset", "frame", OWN_ERROR)


def cache_summary(store: AnchorStore) -> str:
    """Several lines of text."""
    m = store.manifest
    sizes = bytes_by_purpose(store)
    total = sum(shard.bytes for shard in m.shards)
    if m.kind == "memory":
        return _memory_summary(store, total)
    lines = [
        f"{store.directory}",
        f"  kind         {m.kind}: {mode_named(m.kind).describe(m.values, m.columns)}",
        f"  teacher      {m.policy_type}, {m.dtype}{f' under {m.autocast} autocast' if m.autocast else ''}, "
        f"weights {m.teacher.get('weights', '?')[:12]}",
        f"  anchors      {m.num_anchors} from {_sources(store)}, seed {m.seed}",
        f"  size         {human_bytes(total)} in {len(m.shards)} shards, "
        f"{human_bytes(total / m.num_anchors)} per anchor",
        *(
            f"    {purpose:<12}{human_bytes(size / m.num_anchors)} per anchor"
            for purpose, size in sizes.items()
            if size
        ),
        "  instructions",
    ]
    for instruction, count, scale in zip(m.instructions, m.counts, m.scales, strict=True):
        unit = ", ".join(f"{loss} {value:.3g}" for loss, value in scale.values.items())
        lines.append(f"    {count:>6}  {instruction!r}  unit ({scale.source}, n={scale.n}): {unit}")
    return "\n".join(lines)


def _memory_summary(store: AnchorStore, total: int) -> str:
    m = store.manifest
    notes = source_notes(m)
    lines = [
        f"{store.directory}",
        f"  kind         memory of a {m.policy_type}: observations, instructions and actions; no teacher's values",
        f"  frames       {m.num_anchors}, {human_bytes(total)}, {human_bytes(total / m.num_anchors)} per frame",
        "  from",
        *(
            f"    {len(d.frames):>6}  {d.repo_id} ({note.kind}, {note.fps:g} frames per second)"
            for d, note in zip(m.datasets, notes, strict=True)
        ),
        "  instructions",
        *(f"    {count:>6}  {text!r}" for text, count in zip(m.instructions, m.counts, strict=True)),
    ]
    return "\n".join(lines)


def _sources(store: AnchorStore) -> str:
    m = store.manifest
    used = [f"{len(d.frames)} frames of {d.repo_id}" for d in m.datasets if d.frames]
    return f"{m.anchor_source} ({', '.join(used)}; images {m.inputs})"


def bytes_by_purpose(store: AnchorStore) -> dict[str, int]:
    """Bytes of inputs, fixed values, retained values, and the rest."""
    sizes = {"inputs": 0, "fixed": 0, "targets": 0, "bookkeeping": 0}
    for name, size in store.bytes_by_column().items():
        if name.startswith(INPUT):
            sizes["inputs"] += size
        elif name.startswith(FIXED):
            sizes["fixed"] += size
        elif name.startswith(_BOOKKEEPING):
            sizes["bookkeeping"] += size
        else:
            sizes["targets"] += size
    return sizes


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
