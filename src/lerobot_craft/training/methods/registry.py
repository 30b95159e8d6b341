"""The classes of all methods."""

from importlib import import_module

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
    return METHODS[config.method]() if config.enabled else Method()
