"""A small plotting surface: SVG axes in the page's own colours, and markers that tell families apart."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lerobot_craft.report.families import Family
from lerobot_craft.report.markup import Child, Markup, element, fragment

_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 16.0, 16.0, 46.0  # room for tick labels and titles
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LOG_FROM = 30.0  # a wider span of positive values is unreadable on a linear axis


@dataclass(frozen=True)
class Scale:
    """From values to a position between 0 and 1."""

    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, values: Sequence[float]) -> "Scale":
        """One that holds all values, with some room; logarithmic where they are positive and span decades."""
        low, high = min(values), max(values)
        if low > 0 and high / low > _LOG_FROM:
            return cls(10 ** math.floor(math.log10(low)), 10 ** math.ceil(math.log10(high)), log=True)
        room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
        return cls(0.0 if 0 <= low < (high - low) else low - room, high + room)

    def position(self, value: float) -> float:
        """Where the value is: 0 at the low end, 1 at the high end."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values to write at the axis."""
        if self.log:
            decades = round(math.log10(self.high / self.low))
            every = math.ceil((decades + 1) / most)
            return [self.low * 10**i for i in range(0, decades + 1, every)]
        raw = (self.high - self.low) / most
        power = 10 ** math.floor(math.log10(raw))
        step = next(step for factor in (1, 2, 5, 10) if (step := factor * power) >= raw * (1 - 1e-9))
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]

    def label(self, tick: float) -> str:
        """A tick in few letters: a power of ten where decades would need many zeros."""
        if self.log and not 1e-2 <= tick <= 1e3:
            return "10" + str(round(math.log10(tick))).translate(_RAISED)
        return f"{tick:g}"


@dataclass(frozen=True)
class Axes:
    """A drawing area with two scales; positions are in pixels of the drawing, which the page scales to its width."""

    x: Scale
    y: Scale
    width: float = 460.0
    height: float = 340.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixel of a point."""
        return (
            _LEFT + self.x.position(x) * (self.width - _LEFT - _RIGHT),
            self.height - _BOTTOM - self.y.position(y) * (self.height - _TOP - _BOTTOM),
        )

    def frame(self, x_title: str, y_title: str, x_labels: dict[float, str] | None = None) -> Markup:
        """Grid, tick labels and titles."""
        left, bottom = self.at(self.x.low, self.y.low)
        right, top = self.at(self.x.high, self.y.high)
        parts: list[Child] = []
        for value, label in (x_labels or {tick: self.x.label(tick) for tick in self.x.ticks()}).items():
            x, _ = self.at(value, self.y.low)
            parts.append(element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
            parts.append(element("text", label, x=x, y=bottom + 16, class_="tick", text_anchor="middle"))
        for value in self.y.ticks():
            _, y = self.at(self.x.low, value)
            parts.append(element("line", x1=left, x2=right, y1=y, y2=y, class_="grid"))
            parts.append(element("text", self.y.label(value), x=left - 7, y=y + 4, class_="tick", text_anchor="end"))
        middle = (top + bottom) / 2
        parts.append(
            element("text", x_title, x=(left + right) / 2, y=self.height - 8, class_="title", text_anchor="middle")
        )
        turn = f"rotate(-90 13 {middle:.1f})"
        parts.append(element("text", y_title, x=13, y=middle, class_="title", text_anchor="middle", transform=turn))
        return fragment(parts)

    def draw(self, label: str, *parts: Child) -> Markup:
        """The finished drawing; `label` says what it shows to those who cannot see it."""
        box = f"0 0 {self.width:g} {self.height:g}"
        return element("svg", *parts, viewBox=box, role="img", aria_label=label, class_="plot")


def marker(family: Family, x: float, y: float, title: str, size: float = 5.0) -> Markup:
    """A family's marker at a pixel, with a title that shows when one points at it."""
    tip = element("title", title)
    css = f"mark {family.css}"
    if family.marker == "circle":
        return element("circle", tip, cx=x, cy=y, r=size, class_=css)
    if family.marker == "cross":
        arms = f"M{x - size:.1f} {y - size:.1f}L{x + size:.1f} {y + size:.1f}"
        arms += f"M{x - size:.1f} {y + size:.1f}L{x + size:.1f} {y - size:.1f}"
        return element("path", tip, d=arms, class_=f"{css} open")
    corners = {
        "square": ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        "diamond": ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        "triangle": ((0, -1.2), (1.15, 0.9), (-1.15, 0.9)),
    }[family.marker]
    points = "L".join(f"{x + dx * size:.1f} {y + dy * size:.1f}" for dx, dy in corners)
    return element("path", tip, d=f"M{points}Z", class_=css)


def legend(families: Sequence[Family]) -> Markup:
    """Markers and names of the families that a drawing shows."""
    items = [
        element(
            "li",
            element("svg", marker(family, 8, 8, family.name), viewBox="0 0 16 16", class_="key", aria_hidden="true"),
            family.name,
        )
        for family in families
    ]
    return element("ul", items, class_="legend")
