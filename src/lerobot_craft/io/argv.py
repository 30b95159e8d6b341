"""The words of a command line: flags written `--x=y` or `--x y`. The one place that takes them apart."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest

from lerobot_craft.errors import CraftError


def split(word: str) -> tuple[str, str | None]:
    """`--x=y` as (`--x`, `y`); (the word, None) where there is no `=`."""
    name, equals, value = word.partition("=")
    return name, value if equals else None


def renamed(argv: Iterable[str], name_of: Callable[[str], str]) -> list[str]:
    """The same words, each with the name that `name_of` gives its own (with dashes, without value)."""
    found = []
    for word in argv:
        name, value = split(word)
        found.append(name_of(name) if value is None else f"{name_of(name)}={value}")
    return found


def read_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name without dashes, value) of each flag; the value of `--x` is the word after it, empty at the end."""
    for word, following in zip_longest(argv, argv[1:], fillvalue=""):
        name, value = split(word)
        if name.startswith("--"):
            yield name.removeprefix("--"), following if value is None else value


def take_flags(argv: Sequence[str], is_wanted: Callable[[str], bool]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split off the flags whose name (with its dashes) is wanted, as (name, value).

    Raises:
        CraftError: A wanted flag has no value.
    """
    taken: list[tuple[str, str]] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        name, value = split(word)
        # Without dashes and without = it is the value of the flag before, such as a job name.
        if not is_wanted(name) or (value is None and not name.startswith("--")):
            rest.append(word)
            continue
        if value is None:
            value = next(words, "--")
            if value.startswith("--"):
                raise CraftError(f"{name} needs a value: write {name}=VALUE")
        taken.append((name, value))
    return taken, rest


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The value of `--flag=value` or `--flag value`: the first one, as lerobot reads it."""
    for word, following in zip_longest(argv, argv[1:]):
        name, value = split(word)
        if name == flag and (value is not None or following is not None):
            return following if value is None else value
    return None


def without(flag: str, argv: Sequence[str]) -> list[str]:
    """The same words without `--flag=value` or `--flag value`."""
    kept: list[str] = []
    skip = False
    for word in argv:
        name, value = split(word)
        if not skip and name != flag:
            kept.append(word)
        skip = name == flag and value is None
    return kept


def in_place(own: Iterable[str], shared: Iterable[str]) -> list[str]:
    """The names of a configuration in their order, where it repeats some of those that it shares with another.

    A shared name that is not repeated stands behind the one that comes before it there.
    """
    runs: dict[str, list[str]] = {name: [name] for name in own}
    place = next(name for name in shared if name in runs)
    for name in shared:
        if name in runs:
            place = name
        else:
            runs[place].append(name)
    return [name for run in runs.values() for name in run]
