"""Rollouts as strips of pictures: the same prompt before, after plain fine-tuning, after CRaFT."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.results import Filmstrip
from lerobot_craft.report.markup import Markup, element, fragment

_PNG = b"\x89PNG\r\n\x1a\n"
_STAGES = {"before": "before fine-tuning", "plain": "after plain fine-tuning", "craft": "after CRaFT"}


@dataclass(frozen=True)
class Strip:
    """A caption and the PNG bytes of each stage that was filmed, in order."""

    caption: str
    pictures: dict[str, bytes]


def load_strips(media: Sequence[Filmstrip], directory: Path) -> list[Strip]:
    """Read the pictures beside `results.json`; one that is gone is left out.

    Raises:
        CraftError: A name leads out of the directory (the page would carry a file that nobody meant to publish), or the
            file is no PNG.
    """
    strips = []
    for strip in media:
        names = {"before": strip.before, "plain": strip.plain, "craft": strip.craft}
        pictures = {
            stage: picture
            for stage, name in names.items()
            if name is not None and (picture := _read(directory, name)) is not None
        }
        if pictures:
            strips.append(Strip(strip.caption, pictures))
    return strips


def _read(directory: Path, name: str) -> bytes | None:
    path = (directory / name).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise CraftError(f"media: {name} is not below {directory}. Put the picture there and name it relative to it.")
    if not path.is_file():
        return None
    data = path.read_bytes()
    if not data.startswith(_PNG):
        raise CraftError(f"media: {path} is no PNG. Save the picture as PNG, or take it out of the results file.")
    return data


def filmstrips(strips: Sequence[Strip]) -> Markup | None:
    """The strips as figures with their pictures inside the page; None without any."""
    if not strips:
        return None
    return fragment(*(_figure(strip) for strip in strips))


def _figure(strip: Strip) -> Markup:
    rows = [
        fragment(
            element("p", _STAGES[stage], class_="stage"),
            element(
                "img",
                src=f"data:image/png;base64,{base64.b64encode(data).decode()}",
                alt=f"{strip.caption}, {_STAGES[stage]}: frames of one rollout from left to right",
            ),
        )
        for stage, data in strip.pictures.items()
    ]
    return element("figure", element("figcaption", strip.caption), rows, class_="film")
