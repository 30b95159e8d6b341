from lerobot_craft.report.markup import document, element, foreground, fragment
from tests.report.html_checks import assert_well_formed


def test_text_and_attributes_are_escaped():
    made = element("td", '<b> & "quotes"', title='"><script>')
    assert made == '<td title="&quot;&gt;&lt;script&gt;">&lt;b&gt; &amp; &quot;quotes&quot;</td>'


def test_markup_is_not_escaped_twice_and_none_is_nothing():
    assert element("p", element("b", "a<b"), None, ["x", [None, "&"]]) == "<p><b>a&lt;b</b>x&amp;</p>"


def test_text_that_passed_through_an_operation_is_text_again():
    assert fragment(element("b", "x") + "<i>") == "&lt;b&gt;x&lt;/b&gt;&lt;i&gt;"


def test_attribute_names_and_numbers():
    assert element("line", x1=1.0, stroke_width=0.5, y1=1 / 3, class_="a", data_x=None) == (
        '<line x1="1" stroke-width="0.5" y1="0.33" class="a"/>'
    )
    assert element("img", alt="") == '<img alt="">'


def test_a_document_is_well_formed():
    assert_well_formed(document(element("title", "t"), element("p", "body")))


def test_what_matters_stands_open():
    first, second = element("p", "a"), element("p", "b")
    assert foreground(first, fragment()) == first
    assert foreground(fragment(), second) == second
    assert foreground(first, second).startswith("<p>a</p><details><summary>")
