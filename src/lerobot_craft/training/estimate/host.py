"""What a run keeps in the machine's own memory beside the device: anchors and old frames."""

import math
from typing import Any

from lerobot_craft.anchors.loader import DECODED_BYTES
from lerobot_craft.anchors.recipe import num_anchors
from lerobot_craft.training.anchoring.frames_in_memory import KEPT_BYTES
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.estimate.method_parts import MethodParts

_FLOAT32 = 4


def host_parts(cfg: Any, craft: CraftConfig, parts: MethodParts) -> dict[str, int]:
    """Bytes at most, by what they are; reached once every anchor has been visited."""
    pixels = sum(math.prod(feature.shape) for feature in cfg.policy.image_features.values())  # a byte each
    if craft.enabled and craft.method == "er":
        return {"old frames": craft.replay_frames * (pixels * _FLOAT32 + _numbers(cfg))}
    if parts.anchoring is None:
        return {}
    asked = num_anchors(craft.num_anchors, craft.old_frames, parts.anchoring.adapter)
    count = parts.manifest.num_anchors if parts.manifest else asked
    if craft.teacher == "online":
        return {"anchors' frames": min(KEPT_BYTES, count * (pixels + _numbers(cfg)))}
    decoded = count * pixels
    found = {"anchors' decoded images": decoded if decoded <= DECODED_BYTES else 0}
    if parts.manifest is not None:
        found["anchor cache, mapped from disk"] = sum(shard.bytes for shard in parts.manifest.shards)
    return found


def _numbers(cfg: Any) -> int:
    """State and actions of a frame."""
    config = cfg.policy
    steps = len(config.action_delta_indices or [0])
    actions = sum(math.prod(feature.shape) for feature in config.output_features.values())
    state = sum(math.prod(f.shape) for name, f in config.input_features.items() if name not in config.image_features)
    return int(_FLOAT32 * (state + steps * actions))
