from dataclasses import dataclass
from typing import Any, Literal

import pytest

from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json


@dataclass(frozen=True)
class Inner:
    size: int


@dataclass(frozen=True)
class Outer:
    name: str | None
    share: float
    flag: bool
    kind: Literal["a", "b"]
    inner: Inner
    many: list[Inner]
    sizes: dict[str, int]
    free: dict[str, Any]


GOOD: dict[str, Any] = {
    "name": None,
    "share": 0.5,
    "flag": True,
    "kind": "a",
    "inner": {"size": 1},
    "many": [{"size": 2}],
    "sizes": {"x": 3},
    "free": {"anything": [1, None, {"goes": "here"}]},
}


def test_what_is_written_is_read():
    outer = decode(Outer, GOOD)
    assert outer.many == [Inner(2)]
    assert decode(Outer, parse_object(to_json(outer))) == outer


def test_the_order_of_keys_does_not_matter():
    assert to_json(GOOD) == to_json(dict(reversed(GOOD.items())))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"name": 1}, "name"),
        ({"share": "0.5"}, "share"),
        ({"share": True}, "share"),
        ({"flag": 1}, "flag"),
        ({"kind": "c"}, "kind"),
        ({"kind": ["a"]}, "kind"),
        ({"inner": None}, "inner"),
        ({"inner": {"size": 1.0}}, r"inner\.size"),
        ({"inner": {"size": True}}, r"inner\.size"),
        ({"inner": {}}, r"inner\.size: missing"),
        ({"inner": {"size": 1, "more": 2}}, r"inner\.more: unknown"),
        ({"many": [{"size": 1}, 3]}, r"many\[1\]"),
        ({"many": {}}, "many"),
        ({"sizes": {"x": None}}, r"sizes\.x"),
        ({"sizes": [1]}, "sizes"),
    ],
)
def test_a_wrong_value_names_its_field(change, field):
    with pytest.raises(StrictJSONError, match=f"^{field}"):
        decode(Outer, GOOD | change)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 1}',
        b'{"a": {"b": 1, "b": 2}}',
        b'{"a": "\xff"}',
        rb'{"a": "\ud800"}',
        rb'{"\ud800": 1}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"9" * 30 + b"}",
        b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_text_that_is_not_strict_json_is_refused(text):
    with pytest.raises(StrictJSONError):
        parse_object(text)


@pytest.mark.parametrize("content", [{"a": float("nan")}, {"a": {1: 2}}, {"a": (1,)}, {"a": b""}, {"a": "\ud800"}])
def test_content_that_is_not_json_is_not_written(content):
    with pytest.raises(StrictJSONError):
        to_json(content)
