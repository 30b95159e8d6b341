"""README.zh-CN.md keeps in step with README.md: headings, code, numbers, links and pictures."""

import re

import pytest

from tests.docs.pages import ROOT, fences, headings, prose, table_rows

ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
OF_EACH_OTHER = {"README.md", "README.zh-CN.md"}


def levels(text):
    return [level for level, _ in headings(text)]


def numbers(text):
    """The numbers of every row of every table, in order."""
    return [re.findall(r"\d+(?:\.\d+)?", " | ".join(row)) for row in table_rows(text)]


def targets(text):
    found = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", prose(text))
    return sorted({first or second for first, second in found} - OF_EACH_OTHER)


@pytest.mark.parametrize("aspect", [levels, fences, numbers, targets], ids=lambda aspect: aspect.__name__)
def test_both_editions_agree(aspect):
    assert aspect(CHINESE) == aspect(ENGLISH)
    assert len(aspect(ENGLISH)) > 5


def test_each_names_the_other_at_its_top():
    assert "(README.zh-CN.md)" in ENGLISH[:200]
    assert "(README.md)" in CHINESE[:200]


def test_it_is_chinese():
    titles = [title for _, title in headings(CHINESE)]
    assert [title for title in titles if not re.search(r"[一-鿿]", title)] == []
