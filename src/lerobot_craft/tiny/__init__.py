"""LeRobot's own policies at a few hundred thousand parameters, offline.

lerobot's pi0, pi05 and pi0_fast have fixed sizes in their constructors, and their tokenizers are on the Hub. Here
lerobot's own classes are built at sizes from a config file, with tokenizers made locally; forward and loss are
lerobot's. smolvla, act and diffusion need no class of their own.

`make.make_checkpoint` makes a directory that `--policy.path` loads, also in stock `lerobot-train` and
`lerobot-eval` when given `--discover_packages_path=lerobot_craft.tiny`. (Without a prefix: lerobot 0.6.1 takes
`--policy.discover_packages_path` for a field of the policy when there is a `--policy.path`. A second package needs
another prefix, such as `--env.discover_packages_path`: of two equal flags lerobot loads only the last.)

Importing this package registers `pi0_fast_tiny`, `pi0_tiny` and `pi05_tiny` and the processor step they save.
"""

from pathlib import Path

from lerobot_craft.lerobot_api.foreign_code import vouch_for
from lerobot_craft.tiny.pi import PI0FastTinyConfig, PI0TinyConfig, PI05TinyConfig, TinySizes

# Each FAST tokenizer that is made here has a copy of this file, and lerobot runs the copy.
vouch_for(Path(__file__).with_name("processing_action_tokenizer.py"))

__all__ = ["PI0FastTinyConfig", "PI0TinyConfig", "PI05TinyConfig", "TinySizes"]
