"""The part of a model card that `craft eval` fills in when it is asked to; all else in the file is its owner's."""

import re
from pathlib import Path

from lerobot_craft.anchors.files import read_bytes, write_atomically
from lerobot_craft.errors import CraftError

CARD_FILE = "README.md"
NOT_EVALUATED = "Not evaluated. `craft eval before=TEACHER after=CHECKPOINT ... --update_card=true` fills this in."

_SECTION = re.compile(r"<!-- craft:success teacher=([0-9a-f]{64}) -->\n.*?\n<!-- /craft:success -->", re.DOTALL)


def success_section(teacher: str, content: str) -> str:
    """The section between its two marks, which say whose fingerprint the policy before fine-tuning has."""
    return f"<!-- craft:success teacher={teacher} -->\n{content}\n<!-- /craft:success -->"


def teacher_of(card: Path) -> str | None:
    """Fingerprint of the policy before fine-tuning; None where there is no card, or one without the section."""
    if not card.is_file():
        return None
    found = _SECTION.search(_read(card))
    return None if found is None else found[1]


def fill_in(card: Path, content: str) -> None:
    """Put `content` into the section of a card that has one."""
    text = _read(card)
    found = _SECTION.search(text)
    if found is None:
        raise CraftError(f"{card} has lost the marks of its success section: put them back, or leave out --update_card")
    whole = text[: found.start()] + success_section(found[1], content) + text[found.end() :]
    write_atomically(card, whole.encode())


def _read(card: Path) -> str:
    try:
        return read_bytes(card).decode()
    except UnicodeDecodeError as error:
        raise CraftError(f"{card} is no UTF-8 text: save it as such, or leave out --update_card") from error
