import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lerobot_craft.anchors.columns import ColumnSpec, Ragged, concatenate, describe, num_rows, rows_without_number, take


def ragged(lengths, width=2):
    total = sum(lengths)
    return Ragged(torch.arange(total * width).reshape(total, width), torch.tensor(lengths, dtype=torch.int64))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.lists(st.integers(0, 100), max_size=20))
def test_taking_ragged_rows_is_taking_rows_one_by_one(lengths, picks):
    column = ragged(lengths)
    picks = [pick % len(lengths) for pick in picks]
    got = column.take(torch.tensor(picks, dtype=torch.int64))
    assert len(got) == len(picks)
    for row, pick in zip(got.rows(), picks, strict=True):
        assert torch.equal(row, column.rows()[pick])


def test_long_rows_are_taken_like_short_ones():
    column = ragged([3000, 0, 1, 2500])
    for row, pick in zip(column.take(torch.tensor([3, 1, 0, 3])).rows(), (3, 1, 0, 3), strict=True):
        assert torch.equal(row, column.rows()[pick])


def test_taken_rows_are_copies():
    columns = {"dense": torch.zeros(3, 2), "ragged": ragged([1, 2, 600])}
    got = take(columns, torch.tensor([2]))
    got["dense"].fill_(7)
    got["ragged"].values.fill_(-7)
    assert not columns["dense"].any()
    assert columns["ragged"].values.min() == 0


@given(st.lists(st.integers(0, 5), max_size=8))
def test_padding_marks_exactly_the_values(lengths):
    column = ragged(lengths)
    padded, mask = column.padded(fill=-1)
    assert padded.shape == (len(lengths), max(lengths, default=0), 2)
    assert torch.equal(padded[mask], column.values)
    assert bool((padded[~mask] == -1).all())
    assert mask.sum(1).tolist() == lengths


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_concatenated_parts_have_all_rows_in_order(parts):
    columns = [{"dense": torch.rand(len(part), 3), "ragged": ragged(part)} for part in parts]
    whole = concatenate(columns)
    assert num_rows(whole) == sum(map(len, parts))
    assert torch.equal(whole["dense"], torch.cat([part["dense"] for part in columns]))
    rows = [row for part in columns for row in part["ragged"].rows()]
    assert all(torch.equal(a, b) for a, b in zip(whole["ragged"].rows(), rows, strict=True))


def test_offsets_are_where_rows_begin():
    assert ragged([2, 0, 3]).offsets.tolist() == [0, 2, 2, 5]
    assert torch.equal(Ragged.of(ragged([2, 0, 3]).rows()).lengths, torch.tensor([2, 0, 3]))


@pytest.mark.parametrize(
    ("values", "lengths"),
    [
        (torch.zeros(3), torch.tensor([1, 1])),
        (torch.zeros(3), torch.tensor([4, -1])),
        (torch.zeros(3), torch.tensor([3], dtype=torch.int32)),
        (torch.zeros(()), torch.tensor([1])),
        (torch.zeros(1), torch.tensor(1)),
    ],
)
def test_lengths_that_do_not_fit_the_values_are_refused(values, lengths):
    with pytest.raises(ValueError, match="length"):
        Ragged(values, lengths)


def test_columns_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="same number of rows"):
        num_rows({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="same number of rows"):
        num_rows({})
    with pytest.raises(ValueError, match="same columns"):
        concatenate([{"a": torch.zeros(2)}, {"b": torch.zeros(2)}])
    with pytest.raises(ValueError, match="several dtypes"):
        concatenate([{"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.float64)}])
    with pytest.raises(ValueError, match="ragged in some parts"):
        concatenate([{"a": torch.zeros(2)}, {"a": ragged([1, 1])}])


def test_a_description_has_no_rows():
    assert describe(torch.zeros(5, 2, 3, dtype=torch.bfloat16)) == ColumnSpec("bfloat16", [2, 3], ragged=False)
    assert describe(ragged([1, 2])) == ColumnSpec("int64", [2], ragged=True)


def test_rows_that_hold_no_number_are_found():
    nan, inf = float("nan"), float("inf")
    dense = torch.tensor([[1.0, 2.0], [nan, 0.0], [0.0, -inf], [inf, 1.0]]).bfloat16()
    rows = Ragged(dense, torch.tensor([2, 0, 1, 1]))
    assert rows_without_number(dense) == [1, 2, 3]
    assert rows_without_number(dense, or_minus_infinity=True) == [1, 3]
    assert rows_without_number(dense[:, 0]) == [1, 3]
    assert rows_without_number(rows) == [0, 2, 3]
    assert rows_without_number(rows, or_minus_infinity=True) == [0, 3]
    assert rows_without_number(dense[:1]) == rows_without_number(dense[:0]) == []
