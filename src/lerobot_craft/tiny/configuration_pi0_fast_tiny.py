"""Configuration of `pi0_fast_tiny`: lerobot's pi0_fast with its sizes in the config file."""

from dataclasses import dataclass, field

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig

from lerobot_craft.tiny.sizes import TinySizes


@PreTrainedConfig.register_subclass("pi0_fast_tiny")
@dataclass
class PI0FastTinyConfig(PI0FastConfig):  # type: ignore[misc]
    """lerobot's `PI0FastConfig` and the sizes to build at.

    Attributes:
        sizes: What to build at; None is lerobot's full size.
        leave_out_padding: Train on a batch up to its longest prompt and its longest chunk, where lerobot computes as
            many tokens as there could be: the same loss, in about half of the time at these sizes.
    """

    sizes: TinySizes | None = field(default_factory=TinySizes)
    leave_out_padding: bool = False
