"""Anchors of a cache on disk."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Columns
from lerobot_craft.anchors.files import sha256_of
from lerobot_craft.anchors.loader import DECODED_BYTES, AnchorBatch, AnchorLoader, retained_of
from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.recipe import most_visits
from lerobot_craft.lerobot_api.policies import autocast
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.training.anchoring.asking import adapter_off, ask, policy_inputs, visit_generators
from lerobot_craft.training.anchoring.budget_units import layer_scales_of, units_of
from lerobot_craft.training.methods.method import Context, Cost


class CachedAnchors:
    """What the teacher said, read from the cache."""

    def __init__(self, context: Context, loader: AnchorLoader) -> None:
        self._context = context
        self._adapter = adapter_for(context.teacher.config)
        self.loader = loader
        self.directory: Path | None = loader.store.directory
        self.retained = retained_of(loader.manifest, self._adapter, unwrapped(context.policy))
        self.tasks: Sequence[str] = loader.manifest.instructions
        self.num_anchors = len(loader.store)
        self.source: str = loader.manifest.anchor_source
        self.stored_bytes = sum(shard.bytes for shard in loader.manifest.shards)
        columns = loader.store.take(torch.arange(self.num_anchors), ["instruction", "cross"])
        self.instructions: Tensor = columns["instruction"].long()  # type: ignore[union-attr]  # rows of one shape
        self.cross: Tensor = columns["cross"].bool()  # type: ignore[union-attr]

    @property
    def manifest(self) -> Manifest:
        """What the cache says about itself."""
        return self.loader.manifest

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> AnchorBatch:
        """The anchors of a step."""
        return self.loader.batch(step, batch_size, self._context.seed, rank, world_size, most_visits(self._adapter))

    def hold_out(self, indices: Tensor) -> None:
        """Leave these anchors out of all steps."""
        self.loader.hold_out(indices)

    def take(self, indices: Tensor) -> AnchorBatch:
        """Chosen anchors."""
        return self.loader.take(indices)

    def actions(self, indices: Tensor) -> AnchorBatch | None:
        """The same with the teacher's actions: from the cache or, before the first step, from the student itself."""
        anchors = self.loader.take(indices)
        if self.retained.mode == Action.mode:
            return anchors
        if self._context.resumed:
            return None
        columns = self._ask(anchors, indices)
        return None if columns is None else AnchorBatch(anchors.raw, columns, anchors.instruction)

    def _ask(self, anchors: AnchorBatch, indices: Tensor) -> Columns | None:
        adapter, teacher = self._adapter, self._context.teacher
        policy = unwrapped(self._context.policy)
        batch = policy_inputs(anchors.raw, teacher.preprocessor)
        with adapter_off(self._context.policy):
            if adapter.reads_instruction:  # it can be asked where nobody demonstrated, as for cross anchors
                rngs = visit_generators(self._context.seed, None, indices.tolist())
                actions = Action(top_k=self._context.config.top_k)
                return ask(adapter, policy, teacher.config, batch, actions, rngs)
            if adapter.fixed_names:  # noise around demonstrated actions, which a cache does not keep
                return None
            with torch.no_grad(), mode(policy, train=adapter.train_mode), autocast(teacher.config):
                return {"target": adapter.output(policy, batch, {}).values.float().cpu().unsqueeze(1)}

    def units(self, loss_type: str) -> list[float]:
        """Per task, the drift that counts as 1."""
        return units_of(self.manifest.scales, self.tasks, loss_type)

    def layer_scales(self, loss_type: str) -> dict[str, float] | None:
        """The spread of each layer of hidden states."""
        return layer_scales_of(self.manifest.values.get("layer_scales"), loss_type)

    def costs(self) -> list[Cost]:
        """The mapped files, which the system may drop and read again, and images that stay decoded."""
        pixels = sum(math.prod(f.shape) for f in self.manifest.input_features.values() if f.codec == "png")
        decoded = self.num_anchors * pixels
        return [
            Cost("anchor cache, mapped from disk", self.stored_bytes),
            Cost("anchors' decoded images", decoded if decoded <= DECODED_BYTES else 0),
        ]

    def identity(self) -> dict[str, Any]:
        """The manifest, which names the checksum of every shard."""
        return {"teacher": "cache", "manifest": sha256_of(self.loader.store.directory / MANIFEST_FILE)}
