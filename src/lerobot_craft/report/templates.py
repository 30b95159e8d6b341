"""The page's templates: jinja2 with autoescape, so that no name or instruction becomes markup."""

from collections.abc import Iterable

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

type Child = Markup | str
type Section = tuple[str, Markup | None]


def through(points: Iterable[tuple[float, float]]) -> str:
    """An SVG path through these pixels."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _written(value: object) -> object:
    """Floats in templates are coordinates: two decimals are enough."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


ENVIRONMENT = Environment(
    loader=PackageLoader("lerobot_craft.report"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_written,
    trim_blocks=True,
    lstrip_blocks=True,
)
ENVIRONMENT.globals["through"] = through
_PARTS = ENVIRONMENT.get_template("parts.html").module


def part(macro: str, *values: object) -> Markup:
    """What a macro of `parts.html` makes of these values."""
    made: Markup = getattr(_PARTS, macro)(*values)
    return made


def document(title: str, headline: Iterable[str], stamp: str | None, sections: Iterable[Section]) -> str:
    """One HTML document that needs no other file; sections without content are left out."""
    page = ENVIRONMENT.get_template("page.html")
    return page.render(title=title, headline=headline, stamp=stamp, sections=sections) + "\n"


def together(parts: Iterable[Markup | None]) -> Markup | None:
    """One after the other; None if there are none."""
    return Markup("\n").join(part for part in parts if part) or None


def foreground(first: Markup | None, second: Markup | None) -> Markup | None:
    """What matters, and the scenarios on which settings were chosen folded below it; those alone stand open."""
    if first and second:
        return together([first, part("folded", "Scenarios on which settings were chosen", second)])
    return first or second
