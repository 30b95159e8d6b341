"""Contrast by WCAG 2.1: 4.5 for text, 3 for drawings, in both colour schemes."""

import re
from importlib.resources import files

import pytest

from lerobot_craft.report.figures import Axes, Scale, colour

CSS = files("lerobot_craft.report").joinpath("templates/style.css").read_text()
LIGHT, DARK = (dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for block in CSS.split("@media (prefers")[:2])


def luminance(hexadecimal):
    channels = [int(hexadecimal[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first, second):
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_and_families_can_be_read_on_the_paper(scheme):
    for name in ("ink", "soft", "before", "plain", "replay", "craft", "other"):
        assert contrast(scheme[name], scheme["paper"]) >= 4.5, name
    assert contrast(scheme["ink"], scheme["raised"]) >= 4.5
    for family in ("before", "plain", "replay", "craft", "other"):
        assert contrast(scheme["on-badge"], scheme[family]) >= 4.5, family


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0])
def test_numbers_can_be_read_on_the_heatmap(rate):
    assert "color: #14181d" in CSS
    assert contrast("#14181d", colour(rate)) >= 7


def rules(media):
    """The rules within one @media block, by selector."""
    block = CSS.split(f"@media {media} {{")[1].split("\n}")[0]
    return {selector.strip(): body for selector, body in re.findall(r"([^{}]+)\{([^}]*)\}", block)}


def test_text_in_drawings_can_be_read_on_a_phone():
    """A screen of 400 px leaves 372 for a drawing of 460: text must not shrink below 9, and labels not below 10."""
    phone, shrunk = rules("(max-width: 700px)"), (400 - 2 * 14) / Axes(Scale(0, 1), Scale(0, 1)).width
    size = {
        name: float(re.search(r"font-size: ([\d.]+)px", body)[1]) * shrunk
        for selector, body in phone.items()
        for name in re.findall(r"\.(tick|title|end|badge-text)\b", selector)
    }
    assert set(size) == {"tick", "title", "end", "badge-text"}
    assert min(size["tick"], size["title"], size["end"]) > 10
    assert size["badge-text"] > 9


def test_paper_shows_what_is_folded():
    shown = rules("print")["details::details-content"]
    assert "content-visibility: visible" in shown
    assert "block-size: auto" in shown


def test_what_stands_below_a_number_has_its_colour():
    """The page's soft grey is made for the paper: on a coloured cell it fades, in the dark scheme most of all."""
    assert ".heat td small { display: block; margin-left: 0; color: inherit; }" in CSS


def test_lost_and_kept_have_different_colours():
    assert (colour(0.0), colour(0.5), colour(1.0)) == ("#f3a470", "#f6f3ee", "#7dbee2")
