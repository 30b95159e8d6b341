"""What the student makes of the same anchors, beside what the teacher left in the cache."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Ragged
from lerobot_craft.anchors.retained import FIXED, PER_TOKEN, Retained, as_kind
from lerobot_craft.core import drift, fold_tail, pool_hidden_states, token_cross_entropy
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Batch, Fixed, PolicyAdapter


class Compared(NamedTuple):
    """Student beside teacher, at one layer or at the output."""

    name: str
    student: Tensor  # [B, ..., D]
    teacher: Tensor
    mask: Tensor | None  # [B, ...]


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

    `token_ce` is the cross-entropy itself, whose minimum is the teacher's own. With `layer_scales`, each layer's drift
    is divided by its scale before layers are averaged: equation (5).
    """
    device = next(policy.parameters()).device
    fixed = fixed_of(columns, draw, device)
    if retained.mode == "token_ce":
        labels, label_mask = adapter.token_labels(fixed)
        logits = adapter.output(policy, batch, fixed).values
        return token_cross_entropy(logits, labels, mask=label_mask, reduction="none")
    kind = loss_type or retained.loss_types(adapter)[0]
    if kind not in retained.loss_types(adapter):
        raise CraftError(
            f"loss_type {kind!r} cannot compare these values: use {' or '.join(retained.loss_types(adapter))}"
        )
    scales = layer_scales or {}
    drifts = [
        drift(c.student, c.teacher, as_kind(kind), mask=c.mask, scale=scales.get(c.name), reduction="none")
        for c in compare(adapter, policy, batch, columns, retained, fixed, draw)
    ]
    return torch.stack(drifts).mean(dim=0)


def compare(
    adapter: PolicyAdapter,
    policy: Any,
    batch: Batch,
    columns: Mapping[str, Column],
    retained: Retained,
    fixed: Fixed,
    draw: int | Tensor = 0,
) -> list[Compared]:
    """The student's values beside the teacher's, one entry per layer, or one for the output."""
    if retained.mode == "hidden":
        return _compare_hidden(adapter, policy, batch, columns, retained, fixed)
    output = adapter.output(policy, batch, fixed)
    target = columns["target"]
    if isinstance(target, Ragged):
        kept = _at_valid(_ragged(columns, "kept"), output.mask).long()
        return [Compared("output", fold_tail(output.values, kept), _at_valid(target, output.mask), output.mask)]
    teacher = _at_draw(target, draw).to(output.values.device)
    if teacher.shape != output.values.shape:
        raise CraftError(
            f"the policy puts out {tuple(output.values.shape[1:])} per anchor, the cache holds "
            f"{tuple(teacher.shape[1:])}: chunk size or action dimensions changed since it was built"
        )
    return [Compared("output", output.values, teacher, output.mask)]


def fixed_of(columns: Mapping[str, Column], draw: int | Tensor, device: torch.device) -> Fixed:
    """Noise, time or tokens of a batch of anchors, as the adapter wants them."""
    fixed: Fixed = {}
    for name, column in columns.items():
        if not name.startswith(FIXED):
            continue
        if isinstance(column, Ragged):  # tokens: as long as the longest in the batch
            tokens, mask = column.padded()
            fixed["tokens"], fixed["token_mask"] = tokens.long().to(device), mask.to(device)
        else:
            fixed[name.removeprefix(FIXED)] = _at_draw(column, draw).to(device)
    return fixed


def _compare_hidden(
    adapter: PolicyAdapter,
    policy: Any,
    batch: Batch,
    columns: Mapping[str, Column],
    retained: Retained,
    fixed: Fixed,
) -> list[Compared]:
    found = adapter.hidden(policy, batch, retained.layers, fixed or None)
    if retained.pooling == PER_TOKEN:
        return [
            Compared(str(layer), t.hidden, _at_valid(_ragged(columns, f"hidden.{layer}"), t.mask), t.mask)
            for layer, t in found.items()
        ]
    targets = columns.get("teacher_hidden")
    if targets is None:
        targets = columns["target_features"].unsqueeze(1)  # type: ignore[union-attr]  # a dense column by its name
    compared = []
    for position, (layer, tokens) in enumerate(found.items()):
        pooled = pool_hidden_states(tokens.hidden, tokens.mask, retained.pooling, tokens.spans)
        teacher = targets[:, position].to(pooled.features.device)  # type: ignore[index]
        if teacher.shape != pooled.features.shape:
            raise CraftError(
                f"the policy's features at layer {layer} have shape {tuple(pooled.features.shape[1:])}, the cache "
                f"holds {tuple(teacher.shape[1:])}: it was built for another policy or pooling"
            )
        compared.append(Compared(str(layer), pooled.features, teacher, pooled.valid))
    return compared


def _at_draw(column: Tensor, draw: int | Tensor) -> Tensor:
    """[B, draws, ...] -> [B, ...]: for each anchor the draw of this visit, from the first again after the last."""
    return column[torch.arange(len(column)), torch.as_tensor(draw) % column.shape[1]]


def _ragged(columns: Mapping[str, Column], name: str) -> Ragged:
    column = columns.get(name)
    if not isinstance(column, Ragged):
        raise CraftError(f"the cache has no column {name!r}: it was built for other layers or another kind of values")
    return column


def _at_valid(rows: Ragged, mask: Tensor) -> Tensor:
    """Ragged rows -> [B, T, ...] with row i's values at the i-th sample's real positions, zero elsewhere."""
    lengths = mask.sum(dim=1).cpu()
    if not torch.equal(lengths, rows.lengths):
        worst = int((lengths - rows.lengths).abs().argmax())
        raise CraftError(
            f"the policy sees {int(lengths[worst])} real tokens where the teacher saw {int(rows.lengths[worst])}: the "
            "tokenizer, the prompt or the cameras are not those that the cache was built with"
        )
    dense = rows.values.new_zeros((*mask.shape, *rows.values.shape[1:]), device=mask.device)
    dense[mask] = rows.values.to(mask.device)
    return dense
