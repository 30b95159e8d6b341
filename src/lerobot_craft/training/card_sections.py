"""The parts of a model card that craft commands write later; everything else in the file belongs to its owner.

`craft eval --update_card=true` fills in success, `craft remember` lists the pictures that travel with the weights.
"""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import read_bytes, write_atomically

CARD_FILE = "README.md"
NOT_EVALUATED = "Not evaluated. `craft eval before=TEACHER after=CHECKPOINT ... --update_card=true` fills this in."

_SUCCESS = re.compile(r"<!-- craft:success teacher=([0-9a-f]{64}) -->\n.*?\n<!-- /craft:success -->", re.DOTALL)
_MEMORY = re.compile(r"<!-- craft:memory -->\n.*?\n<!-- /craft:memory -->", re.DOTALL)


def success_section(teacher: str, content: str) -> str:
    """The section on success. Its first mark holds the fingerprint of the policy before fine-tuning."""
    return f"<!-- craft:success teacher={teacher} -->\n{content}\n<!-- /craft:success -->"


def memory_section(lines: Sequence[str]) -> str:
    """The section on the memory: one line per dataset whose pictures the checkpoint carries."""
    listed = "\n".join(f"- in `craft_memory/`: {escape(line, quote=False)}" for line in lines) or "None."
    return f"<!-- craft:memory -->\n{listed}\n<!-- /craft:memory -->"


def teacher_of(card: Path) -> str | None:
    """Fingerprint of the policy before fine-tuning; None without a card or without the section."""
    if not card.is_file():
        return None
    found = _SUCCESS.search(_read(card))
    return None if found is None else found[1]


def fill_in(card: Path, content: str) -> None:
    """Replace the content of the success section."""
    text = _read(card)
    found = _SUCCESS.search(text)
    if found is None:
        raise CraftError(f"{card} has lost the marks of its success section: put them back, or leave out --update_card")
    _write(card, text[: found.start()] + success_section(found[1], content) + text[found.end() :])


def list_memory(card: Path, lines: Sequence[str]) -> bool:
    """Replace the list of pictures that travel.

    Returns:
        Whether the card tells the truth afterwards: False if it has no such section, or if there is no card.
    """
    if not card.is_file():
        return False
    text = _read(card)
    found = _MEMORY.search(text)
    if found is None:
        return False
    _write(card, text[: found.start()] + memory_section(lines) + text[found.end() :])
    return True


def _write(card: Path, text: str) -> None:
    write_atomically(card, text.encode())


def _read(card: Path) -> str:
    try:
        return read_bytes(card).decode()
    except UnicodeDecodeError as error:
        raise CraftError(f"{card} is no UTF-8 text: save it as UTF-8, then run the command again") from error
