"""Finds a retention mode by name. Third parties add modes without changing this package, as with adapters.

An installed distribution declares an entry point, which every process finds. A script or notebook registers its mode
for its own process; `craft` imports the registering module if `--discover_packages_path` names it.
"""

import importlib

from lerobot_craft.anchors.retained import Retained
from lerobot_craft.errors import CraftError
from lerobot_craft.policies.registry import installed

ENTRY_POINT_GROUP = "lerobot_craft.retention_modes"
MULTI_LAYER = "hidden_multi_layer"
"""What the original CRaFT notes call `hidden` with several layers."""

_BUILT_IN = {
    "hidden": "lerobot_craft.anchors.modes.hidden:Hidden",
    "token_ce": "lerobot_craft.anchors.modes.token_ce:TokenCE",
    "action": "lerobot_craft.anchors.modes.action:Action",
}
_registered: dict[str, type[Retained]] = {}


def register_mode[Mode: type[Retained]](mode: Mode) -> Mode:
    """Register a retention mode for this process under its `mode`. Use it as a class decorator.

    It takes precedence over installed and built-in modes.

    Raises:
        CraftError: The class is not a complete retention mode.
    """
    _require_mode(mode, repr(mode))
    _registered[mode.mode] = mode
    return mode


def known_modes() -> list[str]:
    """Names of the built-in, registered and installed modes."""
    return list(dict.fromkeys([*_BUILT_IN, *sorted(_registered), *sorted(installed(ENTRY_POINT_GROUP))]))


def mode_named(name: str) -> type[Retained]:
    """Find a mode by its name in `--retention_mode` or a manifest."""
    name = "hidden" if name == MULTI_LAYER else name
    if name in _registered:
        return _registered[name]
    # Installed modes take precedence over built-in ones: somebody installed them on purpose.
    target = installed(ENTRY_POINT_GROUP).get(name) or _BUILT_IN.get(name)
    if target is None:
        raise CraftError(
            f"--retention_mode must be one of {', '.join(known_modes())}; got {name!r:.80}. Another one is a small "
            "file (docs/adding-a-retention-mode.md): name its module with --discover_packages_path"
        )
    module, _, attribute = target.partition(":")
    try:
        mode = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CraftError(f"the retention mode {target} for {name!r} cannot be loaded: {error}") from error
    _require_mode(mode, target)
    return mode  # type: ignore[no-any-return]


def _require_mode(mode: object, described: str) -> None:
    if not (isinstance(mode, type) and issubclass(mode, Retained)):
        raise CraftError(f"{described} is not a class of Retained, so it is no retention mode")
    missing = [name for name in ("mode",) if not hasattr(mode, name)] + sorted(mode.__abstractmethods__)
    if missing:
        raise CraftError(
            f"the retention mode {mode.__name__} lacks {', '.join(missing)} (docs/adding-a-retention-mode.md)"
        )
