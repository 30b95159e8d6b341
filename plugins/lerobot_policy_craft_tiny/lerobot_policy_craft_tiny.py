"""Registers `pi0_tiny`, `pi05_tiny` and `pi0_fast_tiny` in lerobot's commands, without a flag.

Commands for robots import plugins too, and load no policy: there this would only load torch and transformers.
"""

import sys

if "lerobot.policies" in sys.modules:
    import lerobot_craft.tiny  # noqa: F401
