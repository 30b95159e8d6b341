"""The student's values on the same anchors, compared with the cached teacher values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Ragged
from lerobot_craft.anchors.retained import FIXED, Retained, at_draw
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Batch, Fixed, PolicyAdapter


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
