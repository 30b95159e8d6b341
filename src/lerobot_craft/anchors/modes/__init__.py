"""Retention modes, one file each: `Retained` is the contract, and `retained.py` finds a mode by its name.

    @register_mode
    @dataclass(frozen=True)
    class Mine(Retained):
        mode = "mine"

        def take(self, adapter, policy, batch, fixed): ...

docs/adding-a-retention-mode.md is a walkthrough.
"""

from lerobot_craft.anchors.retained import ENTRY_POINT_GROUP, Retained, known_modes, mode_named, register_mode

__all__ = ["ENTRY_POINT_GROUP", "Retained", "known_modes", "mode_named", "register_mode"]
