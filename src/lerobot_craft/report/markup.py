"""HTML and SVG that cannot be written unescaped: every text becomes markup in one place."""

from collections.abc import Iterable
from html import escape

_VOID = {"img", "meta", "br", "col", "line", "rect", "circle", "path", "polyline"}


class Markup(str):
    """Text that is markup already. Only this module makes it."""

    __slots__ = ()


type Child = Markup | str | Iterable["Child"] | None


def element(tag: str, *children: Child, **attributes: str | float | None) -> Markup:
    """`<tag attributes>children</tag>`, with text and attribute values escaped.

    Attribute names lose one trailing underscore (`class_`) and have dashes for the others (`stroke_width`); None leaves
    an attribute or a child out, and numbers have at most two decimals.
    """
    written = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{escape(_text(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID and not children:
        return Markup(f"<{tag}{written}>" if tag in ("img", "meta", "br", "col") else f"<{tag}{written}/>")
    return Markup(f"<{tag}{written}>{fragment(*children)}</{tag}>")


def fragment(*children: Child) -> Markup:
    """Children one after another; plain text is escaped, None is nothing."""
    return Markup("".join(_child(child) for child in children))


def foreground(first: Markup, second: Markup, title: str = "Scenarios on which settings were chosen") -> Markup:
    """What matters, and the rest folded below it; the rest alone stands open."""
    if not (first and second):
        return fragment(first, second)
    return fragment(first, element("details", element("summary", title), second))


def style_sheet(css: str) -> Markup:
    """A `<style>` element. The text is the package's own, never a user's: style has no escapes."""
    return Markup(f"<style>\n{css}</style>")


def document(head: Markup, body: Markup) -> str:
    """A whole HTML document."""
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _child(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child
    if isinstance(child, str):
        return escape(child)
    return "".join(_child(item) for item in child)


def _text(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
