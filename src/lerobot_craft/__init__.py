"""CRaFT: Constrained Retention Fine-Tuning for LeRobot policies.

The public functions are attributes of this module, imported when they are first used: `craft --help` must answer before
torch could be loaded. docs/api.md lists them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Where public names live that are not in `core`.
_ROOMS = {
    "CraftConfig": "training.config",
    "CraftError": "errors",
    "Retained": "anchors.retained",
    "compute_hidden_retention_loss": "training.hidden_loss",
    "extract_student_hidden_features": "training.hidden_loss",
    "register_mode": "anchors.retained",
}

if TYPE_CHECKING:
    from lerobot_craft.anchors.retained import Retained, register_mode
    from lerobot_craft.core import (
        AnchorDrift,
        AnchorPart,
        Dual,
        Multipliers,
        RetentionStep,
        StepReport,
        Surgery,
        compute_dot,
        drift,
        epsilon_schedule,
        identify_image_tokens,
        merge_grads,
        pool_hidden_states,
        project_if_conflict,
        token_cross_entropy,
        update_lambda,
    )
    from lerobot_craft.errors import CraftError
    from lerobot_craft.training.config import CraftConfig
    from lerobot_craft.training.hidden_loss import compute_hidden_retention_loss, extract_student_hidden_features

__all__ = [
    "AnchorDrift",
    "AnchorPart",
    "CraftConfig",
    "CraftError",
    "Dual",
    "Multipliers",
    "Retained",
    "RetentionStep",
    "StepReport",
    "Surgery",
    "compute_dot",
    "compute_hidden_retention_loss",
    "drift",
    "epsilon_schedule",
    "extract_student_hidden_features",
    "identify_image_tokens",
    "merge_grads",
    "pool_hidden_states",
    "project_if_conflict",
    "register_mode",
    "token_cross_entropy",
    "update_lambda",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS.get(name, 'core')}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
