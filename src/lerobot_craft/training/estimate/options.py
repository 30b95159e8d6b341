"""Settings of an estimate beside those of the run: everything behind `--estimate.`."""

from dataclasses import dataclass
from typing import Literal, get_args

from lerobot_craft.errors import CraftError

Strategy = Literal["ddp", "fsdp"]


@dataclass
class EstimateConfig:
    """How many devices share the run, and how the answer is written."""

    # Processes of the run, one on each device.
    world_size: int = 1
    # ddp: every device holds the whole policy | fsdp: weights, gradients and optimizer state are divided.
    strategy: str = "ddp"
    # Print JSON (bytes) in place of the table.
    json: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise CraftError(f"--estimate.world_size must be at least 1; got {self.world_size}")
        if self.strategy not in get_args(Strategy):
            raise CraftError(
                f"--estimate.strategy must be one of {', '.join(get_args(Strategy))}; got {self.strategy!r}"
            )
        if self.strategy == "fsdp" and self.world_size == 1:
            raise CraftError(
                "--estimate.strategy=fsdp divides a policy among devices: say how many, --estimate.world_size=8"
            )
