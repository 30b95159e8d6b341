from dataclasses import dataclass

from lerobot.configs import PreTrainedConfig
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

from lerobot_craft.tiny.pi import PI0FastTinyConfig, PI0TinyConfig, PI05TinyConfig


@PreTrainedConfig.register_subclass("act_per_sample")
@dataclass
class ACTPerSampleConfig(ACTConfig):
    pass


@PreTrainedConfig.register_subclass("diffusion_per_sample")
@dataclass
class DiffusionPerSampleConfig(DiffusionConfig):
    pass


@PreTrainedConfig.register_subclass("smolvla_per_sample")
@dataclass
class SmolVLAPerSampleConfig(SmolVLAConfig):
    pass


@PreTrainedConfig.register_subclass("pi0_fast_per_sample")
@dataclass
class PI0FastPerSampleConfig(PI0FastTinyConfig):
    pass


@PreTrainedConfig.register_subclass("pi0_per_sample")
@dataclass
class PI0PerSampleConfig(PI0TinyConfig):
    pass


@PreTrainedConfig.register_subclass("pi05_per_sample")
@dataclass
class PI05PerSampleConfig(PI05TinyConfig):
    pass
