"""The one place that takes a command line apart."""

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.io.argv import in_place, read_flags, renamed, split, take_flags, value_of, without

ARGV = ["--a=1", "--b", "2", "word", "--c=x=y", "--a", "3", "--end"]


def test_a_word_is_split_at_its_first_equals_sign():
    assert [split(word) for word in ("--c=x=y", "--b", "word", "--d=")] == [
        ("--c", "x=y"),
        ("--b", None),
        ("word", None),
        ("--d", ""),
    ]


def test_flags_have_the_value_after_the_equals_sign_or_the_next_word():
    assert list(read_flags(ARGV)) == [("a", "1"), ("b", "2"), ("c", "x=y"), ("a", "3"), ("end", "")]
    assert list(read_flags(["word=1", "-h"])) == []


def test_the_first_value_counts_and_a_flag_at_the_end_has_none():
    assert [value_of(flag, ARGV) for flag in ("--a", "--b", "--c", "--end", "--none")] == ["1", "2", "x=y", None, None]
    assert value_of("--a", ["--a=", "--a=1"]) == ""


def test_a_flag_is_left_out_with_its_value_everywhere():
    assert without("--a", ARGV) == ["--b", "2", "word", "--c=x=y", "--end"]
    assert without("--b", ["--b", "--b", "x"]) == []
    assert without("--end", ARGV) == ARGV[:-1]


def test_wanted_flags_are_taken_with_their_values():
    taken, rest = take_flags(ARGV, lambda name: name in ("--a", "--b"))
    assert taken == [("--a", "1"), ("--b", "2"), ("--a", "3")]
    assert rest == ["word", "--c=x=y", "--end"]


def test_a_word_without_dashes_is_a_flag_only_with_an_equals_sign():
    assert take_flags(["--job", "craft.x", "craft.x=1"], lambda name: name.startswith("craft.")) == (
        [("craft.x", "1")],
        ["--job", "craft.x"],
    )


@pytest.mark.parametrize("argv", [["--a"], ["--a", "--b=1"]])
def test_a_wanted_flag_needs_a_value(argv):
    with pytest.raises(CraftError, match="--a needs a value: write --a=VALUE"):
        take_flags(argv, lambda name: name == "--a")


def test_names_change_and_values_stay():
    assert renamed(ARGV, lambda name: {"--a": "--z", "2": "4"}.get(name, name)) == [
        *("--z=1", "--b", "4", "word", "--c=x=y", "--z", "3", "--end")
    ]


def test_shared_names_stand_where_their_run_begins():
    assert in_place("aXbYc", "XxYyz") == list("aXxbYyzc")
