"""What must hold of any page, whatever it shows."""

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "col"}


class Outline(HTMLParser):
    """Tags in order with their attributes, the text outside of style, and whether every tag was closed in turn."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.texts, self.crossed = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.crossed.append(tag)

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))

    def count(self, tag):
        return sum(name == tag for name, _ in self.tags)


def outline(page):
    return Outline(page)


def sections(page):
    return re.findall(r"<h2>(.*?)</h2>", page)


def assert_well_formed(page):
    found = outline(page)
    assert found.open == []
    assert found.crossed == []


def assert_self_contained(page):
    """No script, nothing loaded from anywhere, no handler: the file can be mailed and opened offline."""
    found = outline(page)
    assert not {"script", "iframe", "link", "object", "base", "form"} & {tag for tag, _ in found.tags}
    for _, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name in ("href", "srcset", "xlink:href")]
        assert attributes.get("src", "data:image/png;base64,").startswith("data:image/png;base64,")
    assert "url(" not in page
    assert "@import" not in page


def assert_cards_stay_tables(page):
    """A table that becomes cards on a phone says by roles what its layout no longer does."""
    roles = {"table": "table", "thead": "rowgroup", "tbody": "rowgroup", "tr": "row", "td": "cell"}
    inside, seen = False, set()
    for tag, attributes in outline(page).tags:
        if tag == "table":
            inside = attributes.get("class") == "cards"
        if inside and tag in ("table", "thead", "tbody", "tr", "td", "th"):
            of_header = {"col": "columnheader", "row": "rowheader"}.get(attributes.get("scope"))
            assert attributes.get("role") == roles.get(tag, of_header), tag
            seen.add(attributes["role"])
    assert seen == {*roles.values(), "columnheader", "rowheader"}


def assert_pictures_are_told(page):
    """Every drawing and picture says what it shows, or is marked as decoration."""
    for tag, attributes in outline(page).tags:
        if tag == "img":
            assert attributes["alt"]
        if tag == "svg":
            assert attributes.get("aria-label") or attributes.get("aria-hidden") == "true"
