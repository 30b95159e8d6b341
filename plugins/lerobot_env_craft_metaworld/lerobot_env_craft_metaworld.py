"""Registers `--env.type=craft_metaworld` in lerobot's commands, without a flag.

Commands for robots import plugins too, and make no environment: there this would only load torch and gymnasium.
"""

import sys

if "lerobot.envs" in sys.modules:
    import lerobot_craft.bench.metaworld.configuration  # noqa: F401
