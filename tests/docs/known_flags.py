"""Which flags each verb of `craft` has, and their defaults, asked of the code that reads them."""

import argparse
import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

REQUIRED = "required"


class _FoundError(Exception):
    pass


def parser_of(run: Callable[[list[str]], int]) -> argparse.ArgumentParser:
    """The parser that a verb builds for itself."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _FoundError(parser)

    with mock.patch.object(argparse.ArgumentParser, "parse_args", stop):
        try:
            run([])
        except _FoundError as found:
            return found.args[0]
    raise AssertionError(f"{run} parses no arguments")


def options_of(run: Callable[[list[str]], int]) -> dict[str, object]:
    """Flags of a verb that has an argparse parser, with their defaults."""
    return {
        action.option_strings[0]: REQUIRED if action.required else action.default
        for action in parser_of(run)._actions
        if action.option_strings and not isinstance(action, argparse._HelpAction)
    }


def defaults_of(cls: type, prefix: str = "") -> dict[str, object]:
    """Flags of a dataclass that draccus reads, with their defaults; those of dataclasses within it follow a dot."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        inner = _dataclass_in(field.type)
        if inner is not None:
            found |= defaults_of(inner, f"{name}.")
        elif field.default is not dataclasses.MISSING:
            found[f"--{name}"] = field.default
        else:
            made = field.default_factory
            found[f"--{name}"] = REQUIRED if made is dataclasses.MISSING else made()
    return found


def _dataclass_in(annotation: object) -> type | None:
    candidates = [annotation, *typing.get_args(annotation)]
    return next((one for one in candidates if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


def names_of(cls: type, prefix: str = "") -> set[str]:
    """Names of all flags of a dataclass of lerobot; where it offers a choice of classes, those of all of them."""
    found: set[str] = set()
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        found |= {f"--{name}", f"--{name}.type"} if _offers_a_choice(field.type) else {f"--{name}"}
        for inner in _classes_in(field.type):
            found |= names_of(inner, f"{name}.")
    return found


def _offers_a_choice(annotation: object) -> bool:
    return any(hasattr(one, "get_known_choices") for one in (annotation, *typing.get_args(annotation)))


def _classes_in(annotation: object) -> Iterator[type]:
    for one in (annotation, *typing.get_args(annotation)):
        if not isinstance(one, type):
            continue
        if hasattr(one, "get_known_choices"):
            yield from one.get_known_choices().values()
        if dataclasses.is_dataclass(one):
            yield one


def shown(default: object) -> str:
    """A default as docs/flags.md writes it."""
    if default is None:
        return "unset"
    if default == REQUIRED:
        return REQUIRED
    if default in ("", ()):
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, Sequence) and not isinstance(default, str):
        return f"`{','.join(map(str, default))}`"
    return f"`{default if isinstance(default, Path | str | int | float) else repr(default)}`"
