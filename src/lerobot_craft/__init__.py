"""CRaFT: Constrained Retention Fine-Tuning for LeRobot policies.

Nothing is imported here on purpose: `craft --help` must answer before torch could be loaded.
Start at `lerobot_craft.core` for the mathematics and at `lerobot_craft.cli` for the commands.
"""

__version__ = "0.1.0"
