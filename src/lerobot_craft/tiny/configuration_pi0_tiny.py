"""Configuration of `pi0_tiny`: lerobot's pi0 with its sizes in the config file."""

from dataclasses import dataclass, field

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0.configuration_pi0 import PI0Config

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.sizes import TinySizes


@PreTrainedConfig.register_subclass("pi0_tiny")
@dataclass
class PI0TinyConfig(PI0Config):  # type: ignore[misc]
    """lerobot's `PI0Config` and the sizes to build at.

    Attributes:
        sizes: What to build at; None is lerobot's full size.
        text_tokenizer_name: Directory or Hub name of the prompt's tokenizer; lerobot's pi0 leaves no choice.
    """

    sizes: TinySizes | None = field(default_factory=TinySizes)
    text_tokenizer_name: str = "google/paligemma-3b-pt-224"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sizes is not None and self.sizes.num_heads != 8:
            raise CraftError(
                f"pi0 has eight heads whatever its config says: sizes.num_heads={self.sizes.num_heads} cannot run."
            )
