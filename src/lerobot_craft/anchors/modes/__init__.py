"""Retention modes, one file each: `Retained` is the contract, `registry.py` finds a mode by its name.

    @register_mode
    @dataclass(frozen=True)
    class Mine(Retained):
        mode = "mine"

        def take(self, adapter, policy, batch, fixed): ...

docs/adding-a-retention-mode.md is a walkthrough.
"""

from lerobot_craft.anchors.modes.registry import ENTRY_POINT_GROUP, known_modes, mode_named, register_mode
from lerobot_craft.anchors.retained import Retained

__all__ = ["ENTRY_POINT_GROUP", "Retained", "known_modes", "mode_named", "register_mode"]
