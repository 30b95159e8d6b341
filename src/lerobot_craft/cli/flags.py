"""Flags in lerobot's grammar: `--policy.path=DIR` with overrides, and dataclasses parsed by draccus."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lerobot_craft.errors import CraftError

_POLICY = "--policy."
_PLUGINS = "discover_packages_path"


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

    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            config: Config = draccus.parse(config_class, config_path=saved, args=list(argv), prog=program)
        return config
    except (DraccusException, YAMLError) as error:
        raise CraftError(f"{_first_line(error)} (`{program} --help` lists the flags)") from error
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        reason = complaint.getvalue().strip().rpartition("error: ")[2].replace("--", f"--{prefix}")
        raise CraftError(f"{reason} (`{program} --help` lists the flags)") from stop


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[:2]) if lines[0].endswith(":") else lines[0]  # several types
