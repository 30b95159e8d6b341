"""Finds the adapter of a policy. Third parties add adapters without changing this package.

Installed distributions declare an entry point. A script or notebook registers its adapter for its own process.
"""

import functools
import importlib
import sys
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.policies.adapter import PolicyAdapter

ENTRY_POINT_GROUP = "lerobot_craft.policies"

_BUILT_IN = {
    "act": "lerobot_craft.policies.act:ACTAdapter",
    "diffusion": "lerobot_craft.policies.diffusion:DiffusionAdapter",
    "pi0": "lerobot_craft.policies.pi0:PI0Adapter",
    "pi05": "lerobot_craft.policies.pi05:PI05Adapter",
    "pi0_fast": "lerobot_craft.policies.pi0_fast:PI0FastAdapter",
    "smolvla": "lerobot_craft.policies.smolvla:SmolVLAAdapter",
}
_GIVEN = ("policy_type", "output_kind", "reads_instruction", "train_mode", "fixed_names")  # required, without a default
_registered: dict[str, type[PolicyAdapter]] = {}


def register_adapter[Adapter: type[PolicyAdapter]](adapter: Adapter) -> Adapter:
    """Register an adapter for this process under its `policy_type`. Use it as a class decorator.

    It takes precedence over installed and built-in adapters. Other processes, such as the command `craft`, find it only
    if they import the module that registers it (`--policy.discover_packages_path`).

    Raises:
        CraftError: The class is not a complete adapter.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, PolicyAdapter)):
        raise CraftError(f"{adapter!r} is not a class of PolicyAdapter, so it cannot be registered")
    missing = [name for name in _GIVEN if not hasattr(adapter, name)] + sorted(adapter.__abstractmethods__)
    if missing:
        raise CraftError(f"the adapter {adapter.__name__} lacks {', '.join(missing)} (docs/adding-a-policy.md)")
    _registered[adapter.policy_type] = adapter
    return adapter


def supported_policies() -> list[str]:
    """Policy types with a built-in, registered or installed adapter."""
    return sorted({*_BUILT_IN, *_registered, *installed(ENTRY_POINT_GROUP)})


def adapter_for(config: Any) -> PolicyAdapter:
    """The adapter of a policy config: for its own type, else for the nearest base class that has one."""
    for policy_type in _types_of(config):
        if adapter := _load(policy_type):
            return adapter
    raise CraftError(
        f"CRaFT has no adapter for the policy type {config.type!r}. It knows {', '.join(supported_policies())}; "
        "docs/adding-a-policy.md shows how to add one in a small file, also from another package"
    )


def _types_of(config: Any) -> list[str]:
    registered = {cls: name for name, cls in type(config).get_known_choices().items()}
    return [registered[cls] for cls in type(config).__mro__ if cls in registered]


def _load(policy_type: str) -> PolicyAdapter | None:
    if policy_type in _registered:
        return _registered[policy_type]()
    # Installed adapters take precedence over built-in ones: somebody installed them on purpose.
    target = installed(ENTRY_POINT_GROUP).get(policy_type) or _BUILT_IN.get(policy_type)
    if target is None:
        return None
    module, _, name = target.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a method of the contract is missing
        raise CraftError(f"the adapter {target} for {policy_type} cannot be loaded: {error}") from error
    if not isinstance(adapter, PolicyAdapter):
        raise CraftError(f"the adapter {target} for {policy_type} is not a PolicyAdapter (docs/adding-a-policy.md)")
    return adapter


def installed(group: str) -> dict[str, str]:
    """Entry points of a group in installed distributions: name -> target."""
    places = []
    for place in sys.path:
        with suppress(OSError):  # does not exist
            places.append((place, Path(place).stat().st_mtime_ns))
    return _installed_in(tuple(places), group)


@functools.lru_cache(maxsize=16)
def _installed_in(places: tuple[tuple[str, int], ...], group: str) -> dict[str, str]:
    """Cached by the directories' modification times, which change with an installation.

    Reading entry points opens a file of every installed distribution.
    """
    return {entry.name: entry.value for entry in entry_points(group=group)}
