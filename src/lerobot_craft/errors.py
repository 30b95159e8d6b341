"""Errors written for the person who meets them."""

from collections.abc import Callable

_MARK = "\x00"  # around the name of a setting


class CraftError(Exception):
    """Something a person can mend. The message says what is wrong and what to do; the command prints it.

    The text may name settings, which are fields of a configuration (`setting`). `str` shows these names; a verb shows
    the flag that it has for each.
    """

    def __str__(self) -> str:
        return self.told(str)

    def told(self, flag: Callable[[str], str]) -> str:
        """The message, with each setting as `flag` spells it."""
        parts = super().__str__().split(_MARK)
        return "".join(flag(part) if number % 2 else part for number, part in enumerate(parts))

    @property
    def text(self) -> str:
        """The message with its settings still marked, to go into the message of another error."""
        return super().__str__()


def setting(name: str) -> str:
    """The name of a setting, such as `old_dataset.root`, for the text of a `CraftError`."""
    return f"{_MARK}{name}{_MARK}"
