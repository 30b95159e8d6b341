"""Hidden retention as two plain functions, for those who write their own loop: docs/method.md, equations (1) to (10).

`craft train` computes the same drift through `anchors.values`, with groups, units and scales.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lerobot_craft.anchors.modes.hidden import Hidden
from lerobot_craft.anchors.retained import as_kind
from lerobot_craft.core import drift
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.training.config import CraftConfig

_TARGETS = ("target_features", "teacher_hidden")


def extract_student_hidden_features(policy: Any, batch: Mapping[str, Any], craft_config: CraftConfig) -> Tensor:
    """Pooled hidden states of the student, differentiable: [B, D], or [B, layers, (2,) D] of several.

    Args:
        policy: A lerobot policy, wrapped or not.
        batch: As the policy's preprocessor returns it.
        craft_config: Says which layers and which pooling.
    """
    policy = unwrapped(policy)
    adapter = adapter_for(policy.config)
    retained = _retained(craft_config, policy)
    with mode(policy, train=adapter.train_mode):
        pooled = retained.take(adapter, policy, batch, None).values()
    features = torch.stack([vectors for vectors, _ in pooled], dim=1)  # [B, layers, (2,) D]
    return features[:, 0] if features.shape[1:-1] == (1,) else features


def compute_hidden_retention_loss(
    policy: Any, anchor_batch: Mapping[str, Any], craft_config: CraftConfig
) -> tuple[Tensor, dict[str, float]]:
    """Drift of the student's pooled hidden states from the teacher's, and what to log of it.

    Args:
        policy: A lerobot policy, wrapped or not.
        anchor_batch: What the policy's preprocessor returned for the anchors, and beside it the teacher's
            `target_features` [B, D] or `teacher_hidden` [B, layers, 2, D].
        craft_config: Says which layers, which pooling and which loss.

    Returns:
        A float32 scalar, differentiable, and `retention_loss`, `student_hidden_norm`, `target_features_norm`.
    """
    policy = unwrapped(policy)
    adapter = adapter_for(policy.config)
    retained = _retained(craft_config, policy)
    columns = {name: anchor_batch[name] for name in _TARGETS if name in anchor_batch}
    if len(columns) != 1:
        raise CraftError(f"anchors of hidden retention carry one of {' and '.join(_TARGETS)}")
    batch = {name: value for name, value in anchor_batch.items() if name not in _TARGETS}
    kind = as_kind(craft_config.loss_type or "mse")
    with mode(policy, train=adapter.train_mode):
        pairs = retained.compare(adapter, policy, batch, columns, {})
    loss = torch.stack([drift(p.student, p.teacher, kind, mask=p.mask) for p in pairs]).mean()
    return loss, {
        "retention_loss": loss.item(),
        "student_hidden_norm": _mean_norm([pair.student for pair in pairs]),
        "target_features_norm": _mean_norm([pair.teacher for pair in pairs]),
    }


def _retained(config: CraftConfig, policy: Any) -> Hidden:
    retained = config.retained(adapter_for(policy.config), policy)
    if not isinstance(retained, Hidden) or config.per_token:
        raise CraftError("these functions pool hidden states: use retention_mode=hidden without per_token")
    return retained


def _mean_norm(features: list[Tensor]) -> float:
    return torch.stack([f.detach().float().norm(dim=-1).mean() for f in features]).mean().item()
