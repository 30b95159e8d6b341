"""Columns: one attribute of many anchors, with rows of equal or different lengths."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Copying long rows one by one is faster than gathering by index (measured on 64 rows).
_LONG_ROW = 512


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths, concatenated.

    Attributes:
        values: [sum(lengths), ...].
        lengths: int64 [n].
    """

    values: Tensor
    lengths: Tensor

    def __post_init__(self) -> None:
        if self.lengths.dim() != 1 or self.lengths.dtype != torch.int64 or self.values.dim() < 1:
            raise ValueError("a ragged column needs values [total, ...] and int64 lengths [n]")
        if bool((self.lengths < 0).any()) or int(self.lengths.sum()) != len(self.values):
            raise ValueError(f"lengths must be >= 0 and sum to the {len(self.values)} values")

    @classmethod
    def of(cls, rows: Sequence[Tensor]) -> "Ragged":
        """A column from rows [length, ...]; at least one row."""
        return cls(torch.cat(tuple(rows)), torch.tensor([len(row) for row in rows]))

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def offsets(self) -> Tensor:
        """int64 [n + 1]: row i is `values[offsets[i]:offsets[i + 1]]`."""
        return torch.cat((self.lengths.new_zeros(1), self.lengths.cumsum(0)))

    def rows(self) -> tuple[Tensor, ...]:
        """Each row as a view [length, ...]."""
        views: tuple[Tensor, ...] = self.values.split(self.lengths.tolist())
        return views

    def padded(self, fill: float = 0) -> tuple[Tensor, Tensor]:
        """Rows padded to [n, longest, ...], and a boolean mask [n, longest], True at real values."""
        longest = int(self.lengths.max()) if len(self) else 0
        mask = torch.arange(longest) < self.lengths.unsqueeze(1)  # [n, longest]
        padded = self.values.new_full((len(self), longest, *self.values.shape[1:]), fill)
        padded[mask] = self.values
        return padded, mask

    def take(self, rows: Tensor) -> "Ragged":
        """The given rows (int64 [k]), in that order, copied."""
        lengths = self.lengths.index_select(0, rows)
        starts = self.offsets.index_select(0, rows)
        total = int(lengths.sum())
        if total > _LONG_ROW * len(rows):
            pieces = zip(starts.tolist(), lengths.tolist(), strict=True)
            return Ragged(torch.cat([self.values[start : start + length] for start, length in pieces]), lengths)
        # Element j of the result is at its row's start plus its position in the row.
        shifts = starts - (lengths.cumsum(0) - lengths)
        elements = torch.repeat_interleave(shifts, lengths, output_size=total) + torch.arange(total)
        return Ragged(self.values.index_select(0, elements), lengths)


Column = Tensor | Ragged
Columns = dict[str, Column]


@dataclass(frozen=True)
class ColumnSpec:
    """A column's type without its rows.

    Attributes:
        dtype: torch's name, e.g. `bfloat16`.
        shape: Of one row, or of one element of a row if `ragged`.
        ragged: Whether rows differ in length.
    """

    dtype: str
    shape: list[int]
    ragged: bool


def describe(column: Column) -> ColumnSpec:
    """The dtype and row shape of a column."""
    ragged = isinstance(column, Ragged)
    values = column.values if isinstance(column, Ragged) else column
    return ColumnSpec(str(values.dtype).removeprefix("torch."), list(values.shape[1:]), ragged)


def num_rows(columns: Mapping[str, Column]) -> int:
    """Number of rows. Raises ValueError if the columns disagree."""
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) != 1:
        raise ValueError(f"columns must be some and have the same number of rows; got {rows}")
    return next(iter(rows.values()))


def take(columns: Mapping[str, Column], rows: Tensor) -> Columns:
    """The given rows (int64 [k]) of every column, in that order, copied."""
    return {
        name: column.take(rows) if isinstance(column, Ragged) else column.index_select(0, rows)
        for name, column in columns.items()
    }


def rows_without_number(column: Column, *, or_minus_infinity: bool = False) -> list[int]:
    """Indices of rows in a float column that hold NaN or infinity."""
    values = column.values if isinstance(column, Ragged) else column
    if bool(values.isfinite().all()):  # the usual case
        return []
    wrong = values.isnan() | values.isposinf() if or_minus_infinity else ~values.isfinite()
    places = wrong.flatten(1).any(dim=1).nonzero().squeeze(1) if wrong.dim() > 1 else wrong.nonzero().squeeze(1)
    if isinstance(column, Ragged):
        places = torch.searchsorted(column.offsets, places, right=True) - 1
    return sorted(set(places.tolist()))


def concatenate(parts: Iterable[Mapping[str, Column]]) -> Columns:
    """The rows of all parts, in order; every part has the same columns."""
    parts = list(parts)
    names = list(parts[0])
    if any(set(part) != set(names) for part in parts):
        raise ValueError(f"parts must have the same columns; got {[sorted(part) for part in parts]}")
    return {name: _concatenate([part[name] for part in parts], name) for name in names}


def _concatenate(columns: Sequence[Column], name: str) -> Column:
    ragged = [column for column in columns if isinstance(column, Ragged)]
    dense = [column for column in columns if isinstance(column, Tensor)]
    if ragged and dense:
        raise ValueError(f"column {name!r} is ragged in some parts and not in others")
    if len({column.dtype for column in dense} | {column.values.dtype for column in ragged}) != 1:
        raise ValueError(f"column {name!r} has several dtypes")  # torch.cat would promote silently
    if dense:
        return torch.cat(dense)
    return Ragged(torch.cat([column.values for column in ragged]), torch.cat([column.lengths for column in ragged]))
