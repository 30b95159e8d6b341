"""Flags in lerobot's grammar: `--policy.path=DIR` with overrides, and dataclasses parsed by draccus."""

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import get_args, get_type_hints

from lerobot_craft.errors import CraftError

_POLICY = "--policy."
_PLUGINS = "discover_packages_path"
_DAMAGED = "The file is damaged or was edited: copy the checkpoint again; a run takes changes as flags"


@dataclass(frozen=True)
class PolicyFlags:
    """The policy's part of the command line.

    Attributes:
        path: `--policy.path`, the checkpoint directory.
        overrides: Other `--policy.x=y`, as `--x=y`.
        plugins: Packages that register policy types, from `--policy.discover_packages_path` or, as in lerobot's
            commands with `--policy.path`, `--discover_packages_path`.
    """

    path: str | None
    overrides: tuple[str, ...]
    plugins: tuple[str, ...]


def take_policy_flags(argv: Sequence[str]) -> tuple[PolicyFlags, list[str]]:
    """Split off the policy's flags, written `--policy.x=y` or `--policy.x y`."""
    found: dict[str, str] = {}
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith((_POLICY, f"--{_PLUGINS}")):
            rest.append(argument)
            continue
        name, equals, value = argument.removeprefix(_POLICY).removeprefix("--").partition("=")
        if not equals:
            value = next(arguments, "--")
            if value.startswith("--"):
                raise CraftError(f"{argument} needs a value: write {argument}=VALUE")
        found[name] = value
    path = found.pop("path", None)
    plugins = tuple(name for name in found.pop(_PLUGINS, "").split(",") if name)
    return PolicyFlags(path, tuple(f"--{name}={value}" for name, value in found.items()), plugins), rest


def whole_flag(flag: str) -> str:
    """Require a flag to contain its value: a word of its own would be taken for a checkpoint."""
    if "=" not in flag and flag not in ("-h", "--help"):
        raise CraftError(f"{flag} needs a value: write {flag}=VALUE")
    return flag


def parse_flags[Config](
    config_class: type[Config], argv: Sequence[str], program: str, saved: Path | None = None, prefix: str = ""
) -> Config:
    """Parse a dataclass from its flags, over the values of a saved file if given; `--help` prints them and exits.

    Error messages name the flags with `prefix`, as they were typed.
    """
    import draccus
    from draccus.utils import DraccusException
    from yaml import YAMLError  # draccus parses values as YAML and does not catch its errors

    if saved is not None:
        _check_saved(config_class, saved)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            config: Config = draccus.parse(config_class, config_path=saved, args=list(argv), prog=program)
        return config
    except (DraccusException, YAMLError) as error:
        if saved is not None and argv:
            parse_flags(config_class, (), program, saved)  # names the file if it is to blame
        if saved is not None and not argv:
            raise CraftError(f"{saved}: {_first_line(error)}. {_DAMAGED}") from error
        raise CraftError(f"{_first_line(error)} (`{program} --help` lists the flags)") from error
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        reason = complaint.getvalue().strip().rpartition("error: ")[2].replace("--", f"--{prefix}")
        raise CraftError(f"{reason} (`{program} --help` lists the flags)") from stop


def _check_saved(config_class: type, saved: Path) -> None:
    """Refuse a file that holds no settings, or null for one that has to be set: draccus takes null for any type."""
    try:
        content = json.loads(saved.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CraftError(f"{saved} is no JSON ({_first_line(error)}). {_DAMAGED}") from error
    if not isinstance(content, dict):
        raise CraftError(f"{saved} holds {content!r:.80} and no settings. {_DAMAGED}")
    for name, hint in get_type_hints(config_class).items():
        if name in content and content[name] is None and NoneType not in get_args(hint):
            raise CraftError(f"{saved}: {name} is null, and it has to have a value. {_DAMAGED}")


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]  # several types
