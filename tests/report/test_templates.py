import pytest
from jinja2 import UndefinedError

from lerobot_craft.report.figures import Axes, Scale
from lerobot_craft.report.tables import Cell
from lerobot_craft.report.templates import document, foreground, part, together
from tests.report.html_checks import assert_well_formed, outline

HOSTILE = "\"><script>&'"


@pytest.mark.parametrize(
    "made",
    [
        part("table", [HOSTILE, HOSTILE], [[HOSTILE, HOSTILE]], HOSTILE),
        part("grid", HOSTILE, [Cell(HOSTILE, (HOSTILE,))], [[Cell(HOSTILE), Cell(HOSTILE, (HOSTILE,), HOSTILE)]]),
        part("film", HOSTILE, [(HOSTILE, "")]),
        part("scatter", HOSTILE, HOSTILE, Axes(Scale(0, 1), Scale(0, 1), HOSTILE, HOSTILE), [], 3.0),
        part("folded", HOSTILE, HOSTILE),
        document(HOSTILE, [HOSTILE], HOSTILE, [(HOSTILE, part("commands", [HOSTILE]))]),
    ],
)
def test_text_and_attributes_are_escaped_once(made):
    assert_well_formed(made)
    assert "<script" not in made
    assert "&amp;lt;" not in made
    assert HOSTILE in outline(made).text


def test_a_cell_may_hold_markup():
    assert "<code>a&lt;b</code>" in part("table", ["a", "b"], [["x", part("code", "a<b")]], "")


def test_coordinates_have_two_decimals():
    drawn = part("scatter", "", "", Axes(Scale(0, 3), Scale(0, 1)), [], 3.0)
    assert 'viewBox="0 0 460 340"' in drawn
    assert 'x1="182.67"' in drawn


def test_a_value_that_a_template_lacks_is_an_error_and_no_gap():
    with pytest.raises(UndefinedError):
        part("table", ["only one column"], [["name", "cell"]], "")


def test_what_matters_stands_open():
    first, second = part("heading", "a"), part("heading", "b")
    assert foreground(first, None) == first
    assert foreground(None, second) == second
    folded = str(foreground(first, second))
    assert folded.startswith("<h3>a</h3>")
    assert "<details><summary>Scenarios on which settings were chosen</summary>\n<h3>b</h3>" in folded
    assert together([None, None]) is None
