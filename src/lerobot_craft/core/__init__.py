"""The mathematics of constrained retention: pure torch, no lerobot, no files.

All public names are exported here. The equation numbers in docstrings refer to docs/method.md.
"""

from lerobot_craft.core.drift import DriftKind, drift, token_cross_entropy
from lerobot_craft.core.dual import Dual, DualRule, EpsilonDecay, Multipliers, epsilon_schedule, update_lambda
from lerobot_craft.core.pooling import Pooled, Pooling, TokenSpans, identify_image_tokens, pool_hidden_states
from lerobot_craft.core.retention import AnchorDrift, AnchorPart, AnchorReport, RetentionStep, StepReport
from lerobot_craft.core.surgery import (
    Gram,
    MergeWeights,
    NonFiniteGradientError,
    ProjectionMode,
    Surgery,
    compute_dot,
    merge_grads,
    merge_weights,
    project_if_conflict,
)
from lerobot_craft.core.tail import fold_tail, largest_entries

__all__ = [
    "AnchorDrift",
    "AnchorPart",
    "AnchorReport",
    "DriftKind",
    "Dual",
    "DualRule",
    "EpsilonDecay",
    "Gram",
    "MergeWeights",
    "Multipliers",
    "NonFiniteGradientError",
    "Pooled",
    "Pooling",
    "ProjectionMode",
    "RetentionStep",
    "StepReport",
    "Surgery",
    "TokenSpans",
    "compute_dot",
    "drift",
    "epsilon_schedule",
    "fold_tail",
    "identify_image_tokens",
    "largest_entries",
    "merge_grads",
    "merge_weights",
    "pool_hidden_states",
    "project_if_conflict",
    "token_cross_entropy",
    "update_lambda",
]
