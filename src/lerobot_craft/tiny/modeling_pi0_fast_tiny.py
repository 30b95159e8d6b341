"""`pi0_fast_tiny`: lerobot's pi0_fast policy, built at the sizes its config names."""

from typing import Any

from lerobot.policies.pi0_fast import modeling_pi0_fast
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy

from lerobot_craft.tiny.configuration_pi0_fast_tiny import PI0FastTinyConfig
from lerobot_craft.tiny.sizes import at_sizes


class PI0FastTinyPolicy(PI0FastPolicy):  # type: ignore[misc]
    """lerobot's `PI0FastPolicy`; only the sizes differ, forward and loss are lerobot's."""

    config_class = PI0FastTinyConfig
    name = "pi0_fast_tiny"

    def __init__(self, config: PI0FastTinyConfig, **kwargs: Any) -> None:
        with at_sizes(modeling_pi0_fast, config.sizes, config.image_resolution[0]):
            super().__init__(config, **kwargs)
