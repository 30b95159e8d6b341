"""What a teacher would have left in the cache, as far as memory goes: columns of the right shapes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from lerobot_craft.anchors.columns import Columns, Ragged
from lerobot_craft.anchors.retained import FIXED, Retained
from lerobot_craft.anchors.teacher_values import teacher_columns
from lerobot_craft.policies import PolicyAdapter


def anchor_columns(
    adapter: PolicyAdapter, policy: Any, batch: Mapping[str, Any], retained: Retained, rows: int
) -> Columns:
    """Columns of a batch of anchors; the policy itself stands for the teacher.

    Writing tokens cannot be imitated without their values, so a token policy's are as long as it may write at most.
    """
    if adapter.output_kind == "logits" and retained.needs_fixed:
        return _token_columns(policy.config.max_action_tokens, retained, rows)
    rngs = [np.random.default_rng(row) for row in range(rows)]
    with torch.no_grad():
        return teacher_columns(adapter, policy, batch, retained.once(), rngs)


def _token_columns(length: int, retained: Retained, rows: int) -> Columns:
    columns: Columns = {f"{FIXED}tokens": _ragged(rows, length, torch.int32)}
    return columns | {
        name: _ragged(rows, positions, dtype, *width)
        for name, (positions, dtype, width) in retained.token_columns(length).items()
    }


def _ragged(rows: int, length: int, dtype: torch.dtype, *width: int) -> Ragged:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        lengths = torch.full((rows,), length)  # real: code asks for its values
    return Ragged(torch.zeros((rows * length, *width), dtype=dtype), lengths)
