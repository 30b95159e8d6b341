"""What every page is made of: a title, sections that are left out where they are empty, one style."""

from collections.abc import Iterable
from importlib.resources import files
from typing import Protocol

from lerobot_craft.report.markup import Child, Markup, document, element, fragment, style_sheet


class Dated(Protocol):
    """Something that says when and by which release it was made."""

    @property
    def craft_version(self) -> str:
        """The release."""

    @property
    def created(self) -> str:
        """The moment, as ISO 8601 has it."""


def page(title: str, opening: Iterable[Child], sections: Iterable[tuple[str, Markup | None]]) -> str:
    """One HTML document that needs no other file.

    Args:
        title: Of the page.
        opening: What stands below the title.
        sections: Title and content; those without content are left out.
    """
    body = fragment(
        element("header", element("h1", title), opening),
        element("main", [element("section", element("h2", name), content) for name, content in sections if content]),
    )
    return document(_head(title), body)


def stamp(sources: Iterable[Dated]) -> Markup | None:
    """Releases and days that the sources come from; None where nothing says."""
    known = list(sources)
    if not known:
        return None
    versions = ", ".join(dict.fromkeys(source.craft_version for source in known))
    dates = ", ".join(dict.fromkeys(source.created[:10] for source in known))
    return element("p", f"CRaFT {versions}, {dates}", class_="stamp")


def _head(title: str) -> Markup:
    css = files("lerobot_craft.report").joinpath("style.css").read_text(encoding="utf-8")
    return fragment(
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"CRaFT: {title.lower()}"),
        style_sheet(css),
    )
