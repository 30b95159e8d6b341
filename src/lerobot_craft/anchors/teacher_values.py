"""What the teacher makes of a batch of anchors, as rows of a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Columns, Ragged
from lerobot_craft.anchors.retained import FIXED, OWN_ERROR, PER_TOKEN, Retained, as_kind
from lerobot_craft.core import drift, fold_tail, largest_entries, pool_hidden_states, token_cross_entropy
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Batch, Fixed, Output, PolicyAdapter


def generators(seed: int, anchors: Sequence[int]) -> list[np.random.Generator]:
    """One random generator per anchor, whatever batch, rank or process computes it."""
    return [np.random.default_rng((seed, anchor)) for anchor in anchors]


@torch.no_grad()
def teacher_columns(
    adapter: PolicyAdapter, policy: Any, batch: Batch, retained: Retained, rngs: Sequence[np.random.Generator]
) -> Columns:
    """What the teacher makes of a batch, as rows of a cache."""
    fixed = adapter.fix(policy, batch, rngs, retained.draws) if retained.needs_fixed else []
    columns = _fixed_columns(adapter, fixed)
    if retained.mode == "hidden":
        return columns | _hidden_columns(adapter, policy, batch, retained, fixed)
    outputs = [adapter.output(policy, batch, draw) for draw in fixed]
    columns |= _own_error_columns(adapter, policy, batch, retained, fixed, outputs)
    if retained.mode == "token_ce":
        labels, mask = adapter.token_labels(fixed[0])
        return columns | {"teacher_ce": _cross_entropy(outputs[0].values, labels, mask).cpu()}
    if adapter.output_kind == "logits":
        return columns | _logit_columns(outputs[0], retained)
    return columns | {"target": torch.stack([o.values.float().cpu() for o in outputs], dim=1)}  # [B, draws, steps, D]


def _own_error_columns(
    adapter: PolicyAdapter,
    policy: Any,
    batch: Batch,
    retained: Retained,
    fixed: Sequence[Fixed],
    outputs: Sequence[Output],
) -> Columns:
    """The teacher's own distance from the demonstrator by loss type: what the budget is measured in.

    Against one demonstrated token, the divergence of the teacher is its cross-entropy.
    """
    errors: dict[str, list[Tensor]] = {kind: [] for kind in retained.loss_types(adapter)}
    for draw, own in zip(fixed, outputs, strict=True):
        shown = adapter.demonstration(policy, batch, draw)
        output = own if shown.fixed is draw else adapter.output(policy, batch, shown.fixed)
        for kind, found in errors.items():
            if adapter.output_kind == "logits":
                found.append(_cross_entropy(output.values, shown.values, shown.mask))
            else:
                found.append(drift(output.values, shown.values, as_kind(kind), mask=shown.mask, reduction="none"))
    return {f"{OWN_ERROR}{kind}": torch.stack(found).mean(dim=0).cpu() for kind, found in errors.items()}


def _fixed_columns(adapter: PolicyAdapter, fixed: Sequence[Fixed]) -> Columns:
    if not fixed or not fixed[0]:
        return {}
    if adapter.output_kind == "logits":
        tokens, mask = fixed[0]["tokens"].cpu(), fixed[0]["token_mask"].cpu()
        return {f"{FIXED}tokens": Ragged(tokens[mask].to(torch.int32), mask.sum(dim=1))}
    with torch.autocast("cpu", enabled=False):  # on the CPU it refuses to stack float16
        return {  # [B, draws, ...]
            f"{FIXED}{name}": torch.stack([draw[name].cpu() for draw in fixed], dim=1) for name in adapter.fixed_names
        }


def _hidden_columns(
    adapter: PolicyAdapter, policy: Any, batch: Batch, retained: Retained, fixed: Sequence[Fixed]
) -> Columns:
    found = adapter.hidden(policy, batch, retained.layers, fixed[0] if fixed else None)
    if retained.pooling == PER_TOKEN:
        return {
            f"hidden.{layer}": Ragged(tokens.hidden[tokens.mask].cpu(), tokens.mask.sum(dim=1).cpu())
            for layer, tokens in found.items()
        }
    pooled = [pool_hidden_states(t.hidden, t.mask, retained.pooling, t.spans) for t in found.values()]
    if len({p.features.shape[-1] for p in pooled}) > 1:
        raise CraftError("these layers differ in width, so their pooled features cannot be stacked: keep every token")
    features = torch.stack([p.features for p in pooled], dim=1).cpu()  # [B, layers, (2,) D]
    valid = torch.stack([p.valid for p in pooled], dim=1).cpu()
    if features.shape[1:-1] == (1,):
        return {"target_features": features[:, 0], "target_valid": valid[:, 0]}
    return {"teacher_hidden": features, "target_valid": valid}


def _logit_columns(output: Output, retained: Retained) -> Columns:
    logits, lengths = output.values[output.mask], output.mask.sum(dim=1).cpu()  # [real positions, V]
    kept = largest_entries(logits, retained.top_k)
    return {
        "target": Ragged(fold_tail(logits, kept).cpu(), lengths),
        "kept": Ragged(kept.to(torch.int32).cpu(), lengths),
    }


def _cross_entropy(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return token_cross_entropy(logits, labels, mask=mask, reduction="none")
