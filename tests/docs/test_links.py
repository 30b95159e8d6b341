"""Every relative link and picture of README, CONTRIBUTING, CHANGELOG and docs leads to something, anchors included."""

import re
from urllib.parse import unquote

import pytest

from tests.docs.pages import PAGES, headings, name, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
ELSEWHERE = ("http://", "https://", "mailto:")


def links(text):
    return [first or second for first, second in LINK.findall(prose(text))]


def anchors(text):
    """What code hosts make of headings: lower case, without punctuation, hyphens for spaces."""
    made = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for _, title in headings(text)]
    return {
        anchor if made.index(anchor) == i else f"{anchor}-{made[:i].count(anchor)}" for i, anchor in enumerate(made)
    }


def dead_links(page):
    text = page.read_text()
    for link in links(text):
        if link.startswith(ELSEWHERE):
            continue
        place, _, anchor = link.partition("#")
        target = page.parent / unquote(place) if place else page
        if not target.exists() or (anchor and unquote(anchor) not in anchors(target.read_text())):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    assert list(dead_links(page)) == []


def test_there_are_links():
    """If the pattern broke there would be none, and nothing would fail."""
    assert sum(len(links(page.read_text())) for page in PAGES) > 150


def test_a_dead_one_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '# One, two\n[a](#one-two) [b](#two) [c](page.md#one) [d](gone.md) [e](page.md) <img src="no.svg">\n'
    )
    assert list(dead_links(page)) == ["#two", "page.md#one", "gone.md", "no.svg"]
