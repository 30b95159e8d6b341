"""Shards: up to some thousand rows of anchors in one safetensors file, memory-mapped.

A dense column is one tensor. A ragged column is two: `name` [total, ...] and `name.offsets` (int64 [n + 1]).
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, Ragged, num_rows, take
from lerobot_craft.anchors.files import (
    Progress,
    checksum_path,
    plain_errors,
    read_checksum,
    require_file,
    sha256_of,
    write_atomically,
    write_checksum,
)
from lerobot_craft.errors import CraftError

OFFSETS = ".offsets"
STORABLE_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64}
)
_SHARD_NAME = re.compile(r"shard-(\d{5,})\.safetensors")


@dataclass(frozen=True)
class ShardRecord:
    """A shard's entry in the manifest."""

    file: str
    rows: int
    bytes: int
    sha256: str


def shard_name(index: int) -> str:
    """File name of a shard."""
    return f"shard-{index:05d}.safetensors"


def write_shard(directory: Path, index: int, columns: Columns) -> ShardRecord:
    """Write one shard, then the checksum that marks it as finished."""
    rows = num_rows(columns)
    if rows == 0:
        raise ValueError("a shard needs at least one row")
    tensors: dict[str, Tensor] = {}
    for name, column in columns.items():
        if not name or name.endswith(OFFSETS):
            raise ValueError(f"{name!r} cannot be a column's name: {OFFSETS} marks the row limits of a ragged column")
        values = column.values if isinstance(column, Ragged) else column
        if values.dtype not in STORABLE_DTYPES:
            raise ValueError(f"column {name!r} has dtype {values.dtype}, which a cache cannot hold")
        tensors[name] = values
        if isinstance(column, Ragged):
            tensors[name + OFFSETS] = column.offsets
    # Cloned, because safetensors refuses tensors that share memory.
    data = save(
        {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    )
    path = directory / shard_name(index)
    write_atomically(path, data)
    sha256 = write_checksum(path, hashlib.sha256(data).hexdigest())
    return ShardRecord(path.name, rows, len(data), sha256)


class ShardReader:
    """One memory-mapped shard. Opening it checks its structure and reads only the row limits.

    The file must not change while it is open. An inconsistent structure raises CraftError.

    Attributes:
        path: The file.
        rows: Number of anchors.
        columns: Dense columns are views of the file: take rows instead of modifying them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = _as_columns(_map_tensors(path), path)
        try:
            self.rows = num_rows(self.columns)
        except ValueError as error:
            raise _damaged(path, str(error)) from error
        if self.rows == 0:
            raise _damaged(path, "it has no rows")

    def take(self, rows: Tensor) -> Columns:
        """The given rows (int64 [k]) of all columns, in that order, copied."""
        return take(self.columns, rows)


def _damaged(path: Path, what: str) -> CraftError:
    return CraftError(f"{path}: not a shard of anchors: {what}. Rebuild the cache with `craft cache build`.")


def _map_tensors(path: Path) -> dict[str, Tensor]:
    require_file(path)
    try:
        with plain_errors(path), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, RuntimeError, ValueError, TypeError) as error:
        raise _damaged(path, str(error)) from error
    for name, tensor in tensors.items():
        if tensor.dim() == 0 or tensor.dtype not in STORABLE_DTYPES:
            raise _damaged(path, f"{name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensors


def _as_columns(tensors: dict[str, Tensor], path: Path) -> Columns:
    columns: Columns = {}
    for name, tensor in tensors.items():
        if name.endswith(OFFSETS):
            if name.removesuffix(OFFSETS) not in tensors:
                raise _damaged(path, f"{name!r} has no values")
            continue
        offsets = tensors.get(name + OFFSETS)
        columns[name] = tensor if offsets is None else _ragged(tensor, offsets, name, path)
    return columns


def _ragged(values: Tensor, offsets: Tensor, name: str, path: Path) -> Column:
    if offsets.dim() != 1 or offsets.dtype != torch.int64 or len(offsets) == 0:
        raise _damaged(path, f"the row limits of {name!r} are not int64 [n + 1]")
    limits = offsets.clone()  # in memory, so that the checked values are those used
    # Compared, not subtracted: differences of wild numbers may overflow to plausible ones.
    monotone = bool((limits[1:] >= limits[:-1]).all())
    if int(limits[0]) != 0 or not monotone or int(limits[-1]) != len(values):
        raise _damaged(path, f"the row limits of {name!r} do not rise from 0 to its {len(values)} values")
    return Ragged(values, limits.diff())


def finished_shards(directory: Path, progress: Progress | None = None) -> dict[int, ShardRecord]:
    """Shards of an unfinished build that match their checksum file, by number; others must be rebuilt."""
    finished: dict[int, ShardRecord] = {}
    with plain_errors(directory):
        names = sorted(entry.name for entry in directory.iterdir())
    for name in names:
        match = _SHARD_NAME.fullmatch(name)
        path = directory / name
        if match is None or name != shard_name(int(match[1])) or not checksum_path(path).is_file():
            continue
        try:
            sha256 = read_checksum(path)
            if sha256_of(path, progress) == sha256:
                finished[int(match[1])] = ShardRecord(name, ShardReader(path).rows, require_file(path), sha256)
        except CraftError:
            continue  # damaged or incomplete: the build makes it again
    return finished
