"""`pi0_tiny`: lerobot's pi0 policy, built at the sizes its config names."""

from typing import Any

from lerobot.policies.pi0 import modeling_pi0
from lerobot.policies.pi0.modeling_pi0 import PI0Policy

from lerobot_craft.tiny.configuration_pi0_tiny import PI0TinyConfig
from lerobot_craft.tiny.sizes import at_sizes


class PI0TinyPolicy(PI0Policy):  # type: ignore[misc]
    """lerobot's `PI0Policy`; only the sizes differ, forward and loss are lerobot's."""

    config_class = PI0TinyConfig
    name = "pi0_tiny"

    def __init__(self, config: PI0TinyConfig, **kwargs: Any) -> None:
        with at_sizes(modeling_pi0, config.sizes, config.image_resolution[0]):
            super().__init__(config, **kwargs)
