"""All methods by the name that `--craft.method` takes."""

from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.constrained import Constrained
from lerobot_craft.training.methods.distillation import LearningWithoutForgetting
from lerobot_craft.training.methods.ewc import EWC
from lerobot_craft.training.methods.freeze import Freeze
from lerobot_craft.training.methods.l2sp import L2SP
from lerobot_craft.training.methods.method import Method
from lerobot_craft.training.methods.replay import Replay
from lerobot_craft.training.methods.weight_merge import WeightMerge

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (Constrained, Method, Replay, L2SP, EWC, LearningWithoutForgetting, WeightMerge, Freeze)
}


def make_method(config: CraftConfig) -> Method:
    """The method that a configuration names; plain fine-tuning if CRaFT is off."""
    return METHODS[config.method]() if config.enabled else Method()
