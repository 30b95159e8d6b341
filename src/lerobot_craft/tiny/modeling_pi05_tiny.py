"""`pi05_tiny`: lerobot's pi05 policy, built at the sizes its config names."""

from typing import Any

from lerobot.policies.pi05 import modeling_pi05
from lerobot.policies.pi05.modeling_pi05 import PI05Policy

from lerobot_craft.tiny.configuration_pi05_tiny import PI05TinyConfig
from lerobot_craft.tiny.sizes import at_sizes


class PI05TinyPolicy(PI05Policy):  # type: ignore[misc]
    """lerobot's `PI05Policy`; only the sizes differ, forward and loss are lerobot's."""

    config_class = PI05TinyConfig
    name = "pi05_tiny"

    def __init__(self, config: PI05TinyConfig, **kwargs: Any) -> None:
        with at_sizes(modeling_pi05, config.sizes, config.image_resolution[0]):
            super().__init__(config, **kwargs)
