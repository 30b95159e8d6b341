"""The classes of all methods."""

from importlib import import_module

from lerobot_craft.errors import CraftError, setting
from lerobot_craft.training import methods
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Method


def _class_at(place: str) -> type[Method]:
    module, _, name = place.partition(":")
    found: type[Method] = getattr(import_module(f"{methods.__name__}.{module}"), name)
    return found


METHODS = {name: _class_at(place) for name, place in methods.METHODS.items()}


def make_method(config: CraftConfig) -> Method:
    """The method that a configuration names; plain fine-tuning if CRaFT is off."""
    if not config.enabled:
        return Method()
    found = METHODS[config.method]
    if config.anchor_share and not found.has_anchors:
        raise CraftError(f"{setting('method')}={config.method} has no anchors: leave out {setting('anchor_share')}")
    return found()
