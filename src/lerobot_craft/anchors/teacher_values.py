"""The teacher's values on a batch of anchors, as rows of a cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lerobot_craft.anchors.columns import Columns, Ragged
from lerobot_craft.anchors.retained import FIXED, Retained
from lerobot_craft.policies import Batch, Fixed, PolicyAdapter


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
