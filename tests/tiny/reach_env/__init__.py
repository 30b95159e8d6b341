"""A point in a box, as a lerobot environment: `--env.type=reach --env.discover_packages_path=tests.tiny.reach_env`."""

from tests.tiny.reach_env.configuration import ReachEnvConfig
from tests.tiny.reach_env.environment import CORNERS, ReachEnv, instruction_for

__all__ = ["CORNERS", "ReachEnv", "ReachEnvConfig", "instruction_for"]
