"""What the installed distribution says it requires, against what is installed.

Read from metadata and not by importing: `import lerobot.policies` takes many seconds, a wrong version would
still import, and the list of requirements lives in one place, the distribution itself.
"""

import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement

# Only these are followed into their own requirements; below them it is the libraries' own business.
_FOLLOWED = frozenset({"lerobot", "lerobot-craft"})


@dataclass(frozen=True)
class Need:
    """One required distribution: which versions fit, and which one is installed (None: none)."""

    name: str
    fitting: str
    installed: str | None
    fits: bool


def installed_version(name: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def needs(extra: str = "") -> list[Need]:
    """What `lerobot-craft` requires, directly and through lerobot; with an extra, what that adds to it.

    Empty where it cannot be read: craft runs without being installed, or `packaging` is absent.
    """
    if importlib.util.find_spec("packaging") is None:
        return []
    basic = _by_name(_walk("lerobot-craft", "", set()))
    if not extra:
        return list(basic.values())
    return [need for name, need in _by_name(_walk("lerobot-craft", extra, set())).items() if name not in basic]


def _by_name(found: Iterable[Need]) -> dict[str, Need]:
    """One need per distribution: several lines may ask for it, and one that does not fit decides."""
    needed: dict[str, Need] = {}
    for need in found:
        if need.name not in needed or not need.fits:
            needed[need.name] = need
    return needed


@functools.cache
def _requirements(distribution: str) -> "list[Requirement]":
    """The requirement lines of an installed distribution. Cached: lerobot has hundreds, and they do not change."""
    from packaging.requirements import Requirement

    return [Requirement(line) for line in importlib.metadata.requires(distribution) or []]


def _walk(distribution: str, extra: str, seen: set[tuple[str, str]]) -> Iterator[Need]:
    from packaging.utils import canonicalize_name

    if (distribution, extra) in seen or installed_version(distribution) is None:
        return
    seen.add((distribution, extra))
    for requirement in _requirements(distribution):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        if name != distribution:
            version = installed_version(name)
            fits = version is not None and requirement.specifier.contains(version, prereleases=True)
            yield Need(name, str(requirement.specifier), version, fits)
        if name in _FOLLOWED:
            for wanted in ("", *sorted(requirement.extras)):
                yield from _walk(name, wanted, seen)
