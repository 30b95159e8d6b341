from lerobot_craft.report.evaluation_page import render_evaluation
from tests.evaluation.test_matrix import made
from tests.report.html_checks import assert_self_contained, assert_well_formed, outline, sections

HOSTILE = '<script>alert("1")</script>'


def test_the_page_is_whole_and_shows_rates_with_intervals_and_scores():
    page = render_evaluation(made())
    assert_well_formed(page)
    assert_self_contained(page)
    assert sections(page) == ["Success", "As a sequence of tasks", "Checkpoints", "Command"]
    text = outline(page).text
    assert "n = 4 episodes per task" in text
    assert "0.75 0.30 to 0.95" in text
    assert "learned one after the other: b, c" in text


def test_without_an_order_there_are_no_scores():
    assert sections(render_evaluation(made(learned=[]))) == ["Success", "Checkpoints", "Command"]


def test_names_are_text_and_never_markup():
    row = made().rows[0]
    page = render_evaluation(made(rows=[type(row)(HOSTILE, HOSTILE, "x", row.successes)], learned=[], command=HOSTILE))
    assert "<script" not in page
    assert HOSTILE in outline(page).text
