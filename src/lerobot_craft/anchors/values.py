"""Values of the teacher and of the student on anchors, and the unit of the budget that is measured from them.

The unit: docs/method.md, equations (25) and (28). Actions and tokens: the teacher's own error on its demonstrations,
per instruction. For an instruction without demonstrations (cross anchors only): its error on its own actions. Values at
layers have no demonstrator: their unit is their spread, the mean drift from the mean over the instruction's anchors.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, Ragged
from lerobot_craft.anchors.manifest import Manifest, Scale, ShardReader
from lerobot_craft.anchors.retained import FIXED, OWN_ERROR, Retained, as_kind, at_draw, dense, mode_named
from lerobot_craft.core import drift
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Batch, Fixed, PolicyAdapter
from lerobot_craft.policies.taps import KnownImages


def generators(seed: int, anchors: Sequence[int]) -> list[np.random.Generator]:
    """One random generator per anchor, independent of batch, rank and process."""
    return [np.random.default_rng((seed, anchor)) for anchor in anchors]


@torch.no_grad()
def teacher_columns(
    adapter: PolicyAdapter, policy: Any, batch: Batch, retained: Retained, rngs: Sequence[np.random.Generator]
) -> Columns:
    """The teacher's values on a batch, as rows of a cache."""
    fixed = adapter.fix(policy, batch, rngs, retained.draws) if retained.needs_fixed else []
    return _fixed_columns(adapter, fixed) | retained.columns(adapter, policy, batch, fixed)


def _fixed_columns(adapter: PolicyAdapter, fixed: Sequence[Fixed]) -> Columns:
    if not fixed or not fixed[0]:
        return {}
    if adapter.output_kind == "logits":
        tokens, mask = fixed[0]["tokens"].cpu(), fixed[0]["token_mask"].cpu()
        return {f"{FIXED}tokens": Ragged(tokens[mask].to(torch.int32), mask.sum(dim=1))}
    with torch.autocast("cpu", enabled=False):  # CPU autocast refuses to stack float16
        return {  # [B, draws, ...]
            f"{FIXED}{name}": torch.stack([draw[name].cpu() for draw in fixed], dim=1) for name in adapter.fixed_names
        }


def student_drift(
    adapter: PolicyAdapter,
    policy: Any,
    batch: Batch,
    columns: Mapping[str, Column],
    retained: Retained,
    loss_type: str | None = None,
    *,
    draw: int | Tensor = 0,
    layer_scales: Mapping[str, float] | None = None,
) -> Tensor:
    """Drift of each anchor, [B], differentiable: the student's values against the cached ones.

    `token_ce` returns the cross-entropy itself, whose minimum is the teacher's own. With `layer_scales`, each layer's
    drift is divided by its scale before averaging over layers: equation (5).
    """
    device = next(policy.parameters()).device
    fixed = fixed_of(columns, draw, device)
    allowed = retained.loss_types(adapter)
    kind = loss_type or allowed[0]
    if kind not in allowed:
        raise CraftError(f"loss_type {kind!r} cannot compare these values: use {' or '.join(allowed)}")
    scales = layer_scales or {}
    compared = retained.compare(adapter, policy, batch, columns, fixed, draw)
    return torch.stack([retained.distance(c, kind, scales.get(c.name)) for c in compared]).mean(dim=0)


def looked_up(
    images: KnownImages, rows: Sequence[int] | None, retained: Retained, adapter: PolicyAdapter, policy: Any
) -> AbstractContextManager[None]:
    """Within this context the policy looks up what it makes of the images of these anchors.

    Not where hidden states are retained: their adapters count tokens by watching the vision tower work.
    """
    embedder = adapter.image_embedder(policy)
    return images.of(None if retained.layers or embedder is None else rows, embedder and embedder.module)


def fixed_of(columns: Mapping[str, Column], draw: int | Tensor, device: torch.device) -> Fixed:
    """Noise, time or tokens of a batch of anchors, as the adapter expects them."""
    fixed: Fixed = {}
    for name, column in columns.items():
        if not name.startswith(FIXED):
            continue
        if isinstance(column, Ragged):  # tokens, padded to the longest in the batch
            tokens, mask = column.padded()
            fixed["tokens"], fixed["token_mask"] = tokens.long().to(device), mask.to(device)
        else:
            fixed[name.removeprefix(FIXED)] = at_draw(column, draw).to(device)
    return fixed


_SPREAD_LOSSES = ("mse", "l1", "cosine")
_AGREE = 1e-3  # relative; the order of sums depends on machine and thread count


def measure_scales(
    readers: Sequence[ShardReader], num_instructions: int, retained: Retained
) -> tuple[list[Scale], dict[str, dict[str, float]]]:
    """The scale of each instruction and, for values at layers, each layer's spread over all instructions."""
    return _measure(readers, num_instructions, type(retained), [str(layer) for layer in retained.layers])


def forged_scales(readers: Sequence[ShardReader], manifest: Manifest) -> Iterator[str]:
    """Manifest scales that differ from the measured ones: a wrong unit makes the budget hold always or never.

    A manifest whose layers do not match its columns is refused elsewhere, where the policy is available.
    """
    if manifest.kind == "memory":
        return  # a memory has no teacher, so no unit
    mode = mode_named(manifest.kind)
    layers = [] if mode.has_own_error else list(manifest.values.get("layers_to_save", ()))
    if not _can_measure(readers[0].columns, mode, layers):
        return
    scales, layer_scales = _measure(readers, len(manifest.instructions), mode, layers)
    stated = {f"scales[{i}].values": scale.values for i, scale in enumerate(manifest.scales)}
    measured = {f"scales[{i}].values": scale.values for i, scale in enumerate(scales)}
    stated |= {f"values.layer_scales.{name}": v for name, v in manifest.values.get("layer_scales", {}).items()}
    measured |= {f"values.layer_scales.{name}": values for name, values in layer_scales.items()}
    for where, values in stated.items():
        for loss, value in values.items():
            found = measured.get(where, {}).get(loss)
            if found is None:
                yield f"{where}.{loss} is {value:g}, and its anchors have no such measure"
            elif not math.isclose(value, found, rel_tol=_AGREE, abs_tol=1e-30):
                yield f"{where}.{loss} is {value:g}, and its anchors give {found:g}"


def _can_measure(columns: Columns, mode: type[Retained], layers: Sequence[str]) -> bool:
    if mode.has_own_error:
        return not any(isinstance(c, Ragged) for name, c in columns.items() if name.startswith(OWN_ERROR))
    return mode.can_measure(columns, layers)


def _measure(
    readers: Sequence[ShardReader], num_instructions: int, mode: type[Retained], layers: Sequence[str]
) -> tuple[list[Scale], dict[str, dict[str, float]]]:
    if mode.has_own_error:
        return _own_errors(readers, num_instructions), {}
    return _spreads(readers, num_instructions, mode, layers)


def _own_errors(readers: Sequence[ShardReader], num_instructions: int) -> list[Scale]:
    instruction = _joined(readers, "instruction").long()
    demonstrated = ~_joined(readers, "cross")
    names = [name for name in readers[0].columns if name.startswith(OWN_ERROR)]
    errors = {name.removeprefix(OWN_ERROR): _joined(readers, name).double() for name in names}
    scales = []
    for index in range(num_instructions):
        of_instruction = instruction == index
        shown = of_instruction & demonstrated
        chosen = shown if shown.any() else of_instruction
        values = {loss: error[chosen].mean().item() for loss, error in errors.items()}
        scales.append(Scale("demonstrations" if shown.any() else "self", int(chosen.sum()), values))
    return scales


def _spreads(
    readers: Sequence[ShardReader], num_instructions: int, mode: type[Retained], layers: Sequence[str]
) -> tuple[list[Scale], dict[str, dict[str, float]]]:
    per_layer = {layer: _Spread(num_instructions) for layer in layers}
    for again in (False, True):  # first the mean, then the distances from it
        for reader in readers:
            instruction = dense(reader.columns["instruction"]).long()
            for layer, vectors, anchors in mode.vectors(reader.columns, layers):
                per_layer[layer].add(vectors, instruction[anchors], distances=again)
    counts = torch.bincount(_joined(readers, "instruction").long(), minlength=num_instructions).tolist()
    scales = []
    for index in range(num_instructions):
        found = [per_layer[layer].of(index) for layer in layers]
        values = {loss: sum(spread[loss] for spread in found) / len(found) for loss in _SPREAD_LOSSES}
        scales.append(Scale("spread", counts[index], values))
    return scales, {layer: spread.overall() for layer, spread in per_layer.items()}


class _Spread:
    """Mean vector per instruction, then the mean drift from it; summed in float64, in shard order."""

    def __init__(self, num_instructions: int) -> None:
        self._count = torch.zeros(num_instructions, dtype=torch.float64)
        self._sum: Tensor | None = None  # [instructions, D]
        self._distance = {loss: torch.zeros(num_instructions, dtype=torch.float64) for loss in _SPREAD_LOSSES}

    def add(self, vectors: Tensor, groups: Tensor, *, distances: bool) -> None:
        """Add vectors [n, D] of instructions `groups` [n]."""
        if self._sum is None:
            self._sum = torch.zeros(len(self._count), vectors.shape[-1], dtype=torch.float64)
        if not distances:
            self._count += torch.bincount(groups, minlength=len(self._count))
            for group in groups.unique().tolist():  # few; converting all vectors to float64 first takes twice as long
                self._sum[group] += vectors[groups == group].sum(dim=0, dtype=torch.float64)
            return
        mean = (self._sum / self._count.clamp_min(1)[:, None]).float()[groups]
        for loss, total in self._distance.items():
            total.index_add_(0, groups, drift(vectors, mean, as_kind(loss), reduction="none").double())

    def of(self, instruction: int) -> dict[str, float]:
        """Mean drift by loss type within an instruction."""
        count = self._count[instruction].clamp_min(1)
        return {loss: (total[instruction] / count).item() for loss, total in self._distance.items()}

    def overall(self) -> dict[str, float]:
        """Mean drift over all vectors, each from its own instruction's mean."""
        count = self._count.sum().clamp_min(1)
        return {loss: (total.sum() / count).item() for loss, total in self._distance.items()}


def _joined(readers: Sequence[ShardReader], name: str) -> Tensor:
    return torch.cat([dense(reader.columns[name]) for reader in readers])
