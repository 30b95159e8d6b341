"""Recipes: flags of `craft train` kept in a file, named by `--config_path`.

lerobot reads a run's whole configuration from `--config_path`, and knows neither a `craft` section nor policy settings
beside `--policy.path`. So a file with a `craft` section is read here, as what it is: flags that somebody else typed. A
file without one, such as the `train_config.json` of a checkpoint, is left to lerobot.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError

SHIPPED = Path(__file__).parents[1] / "recipes"
_CONFIG_PATH = "--config_path"
_OF_LEROBOT = "train_config.json"


def with_recipe(argv: Sequence[str]) -> list[str]:
    """The same flags, with those of a recipe in place of its `--config_path`; a flag that is typed too wins."""
    place, rest = _take_config_path(argv)
    recipe = None if place is None else _read(place)
    if recipe is None:
        return list(argv)
    typed = {word.partition("=")[0].removeprefix("--") for word in rest}
    return [*(flag for name, flag in _flags(recipe) if not _is_typed(name, typed)), *rest]


def _take_config_path(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    for index, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == _CONFIG_PATH and (equals or index + 1 < len(argv)):
            return (value if equals else argv[index + 1]), [*argv[:index], *argv[index + (1 if equals else 2) :]]
    return None, list(argv)


def _read(place: str) -> dict[str, Any] | None:
    """The recipe of this name; None for what is lerobot's to read, and to complain of."""
    path = _find(place)
    if path.suffix != ".json" or path.name == _OF_LEROBOT:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    except ValueError as error:
        raise CraftError(f"{_CONFIG_PATH}={place} cannot be read as JSON ({error}): correct the file") from error
    return found if isinstance(found, dict) and "craft" in found else None


def _find(place: str) -> Path:
    """A file of this machine, or the recipe of that name that comes with the package."""
    path = Path(place)
    if path.parts[:-1] != (SHIPPED.name,) or path.is_file():
        return path
    shipped = sorted(recipe.name for recipe in SHIPPED.glob("*.json"))
    if path.name not in shipped:
        raise CraftError(
            f"{_CONFIG_PATH}={place}: there is no such file, and no recipe of that name; the recipes are "
            + ", ".join(f"{SHIPPED.name}/{name}" for name in shipped)
        )
    return SHIPPED / path.name


def _flags(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(name, flag) of every setting; text stands as it is, everything else as JSON, which lerobot's flags read."""
    for key, value in section.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _flags(value, f"{name}.")
        else:
            yield name, f"--{name}={value if isinstance(value, str) else json.dumps(value)}"


def _is_typed(name: str, typed: set[str]) -> bool:
    """Whether the command line has this flag, or a group that holds it: `--peft={...}` for `peft.r`."""
    parts = name.split(".")
    return any(".".join(parts[:length]) in typed for length in range(1, len(parts) + 1))
