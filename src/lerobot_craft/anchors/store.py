"""Reading a finished cache: check it as a whole, then access rows by index."""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, Ragged, concatenate, describe, take
from lerobot_craft.anchors.manifest import Manifest, ShardReader, ShardRecord, remedy
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import HASHING_THREADS, Progress, checksum_path, read_checksum, require_file, sha256_of


class AnchorStore:
    """The rows of a cache. Small columns live in memory; large ones (usually images) stay in the mapped files."""

    def __init__(self, directory: Path, manifest: Manifest, readers: list[ShardReader], resident_bytes: int) -> None:
        self.directory = directory
        self.manifest = manifest
        self._readers = readers
        self._starts = torch.tensor([0, *(reader.rows for reader in readers)]).cumsum(0)  # [shards + 1]
        self._sizes = _bytes_by_column(readers)
        resident = _smallest(self._sizes, resident_bytes)
        # One gather instead of one per shard: a batch from 50 shards takes microseconds, not milliseconds.
        self._resident = concatenate({name: reader.columns[name] for name in resident} for reader in readers)
        self._mapped = {
            name: _MappedColumn([reader.columns[name] for reader in readers], self._starts)
            for name in self._sizes
            if name not in resident
        }

    @classmethod
    def open(
        cls,
        directory: Path | str,
        verify: bool = True,
        progress: Progress | None = None,
        resident_bytes: int = 256 * 2**20,
    ) -> "AnchorStore":
        """Open a cache, or raise an error that says what is wrong.

        Args:
            directory: A finished cache.
            verify: Check the SHA-256 of every shard; otherwise only presence, sizes and structure.
            progress: Called with the number of newly verified bytes.
            resident_bytes: The smallest columns are kept in memory as long as they fit into this.
        """
        directory = Path(directory)
        manifest = Manifest.load(directory)
        for shard in manifest.shards:
            _check_file(directory / shard.file, shard)
        if verify:
            _verify(directory, manifest.shards, progress)
        readers = [_open_shard(directory / shard.file, shard, manifest) for shard in manifest.shards]
        return cls(directory, manifest, readers, resident_bytes)

    def __len__(self) -> int:
        return self.manifest.num_anchors

    @property
    def readers(self) -> Sequence[ShardReader]:
        """The shards, in order."""
        return self._readers

    def take(self, indices: Tensor, names: Collection[str] | None = None) -> Columns:
        """The given anchors (int64 [k]), in that order, copied: all columns, or those named."""
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"anchors are numbered from 0 to {len(self) - 1}")
        wanted = self._sizes if names is None else [name for name in self._sizes if name in names]
        columns = take({name: self._resident[name] for name in wanted if name in self._resident}, indices)
        if mapped := [name for name in wanted if name in self._mapped]:
            shards = torch.searchsorted(self._starts, indices, right=True) - 1  # [k]
            columns |= {name: self._mapped[name].take(indices, shards) for name in mapped}
        return {name: columns[name] for name in wanted}

    def bytes_by_column(self) -> dict[str, int]:
        """Size of each column in bytes."""
        return dict(self._sizes)


class _MappedColumn:
    """A column too large for memory: values stay in the shards, row positions are kept here.

    Rows are copied one by one. They are long (otherwise the column would be small), and a batch touches almost as many
    shards as it has rows: grouping by shard first was measured three times slower.
    """

    def __init__(self, parts: list[Column], starts: Tensor) -> None:
        self._values = [part.values if isinstance(part, Ragged) else part for part in parts]
        self._starts = starts
        ragged = [part for part in parts if isinstance(part, Ragged)]
        self._begins = torch.cat([part.offsets[:-1] for part in ragged]) if ragged else None  # [num_anchors]
        self._lengths = torch.cat([part.lengths for part in ragged]) if ragged else None  # [num_anchors]

    def take(self, indices: Tensor, shards: Tensor) -> Column:
        if self._begins is None or self._lengths is None:
            rows = indices - self._starts.index_select(0, shards)
            return self._copy(shards, rows, torch.ones_like(rows))
        begins, lengths = self._begins.index_select(0, indices), self._lengths.index_select(0, indices)
        return Ragged(self._copy(shards, begins, lengths), lengths)

    def _copy(self, shards: Tensor, begins: Tensor, lengths: Tensor) -> Tensor:
        places = zip(shards.tolist(), begins.tolist(), (begins + lengths).tolist(), strict=True)
        nothing = self._values[0][:0]  # gives dtype and shape if no row is requested
        return torch.cat([nothing, *(self._values[shard][begin:end] for shard, begin, end in places)])


def _smallest(sizes: dict[str, int], budget: int) -> set[str]:
    chosen: set[str] = set()
    for name, size in sorted(sizes.items(), key=lambda item: item[1]):
        budget -= size
        if budget < 0:
            break
        chosen.add(name)
    return chosen


def _bytes_by_column(readers: list[ShardReader]) -> dict[str, int]:
    return {name: sum(_nbytes(reader.columns[name]) for reader in readers) for name in sorted(readers[0].columns)}


def _nbytes(column: Column) -> int:
    return column.values.nbytes + column.offsets.nbytes if isinstance(column, Ragged) else column.nbytes


def _check_file(path: Path, shard: ShardRecord) -> None:
    size = require_file(path)
    if size != shard.bytes:
        raise CraftError(f"{path}: {size} bytes, but the manifest says {shard.bytes}. {remedy(path.parent)}")
    # Present if a build was stopped right after writing its manifest; it must at least agree.
    if checksum_path(path).exists() and read_checksum(path) != shard.sha256:
        raise CraftError(f"{checksum_path(path)}: another SHA-256 than in the manifest. {remedy(path.parent)}")


def _verify(directory: Path, shards: list[ShardRecord], progress: Progress | None) -> None:
    lock = Lock()

    def report(count: int) -> None:
        if progress is not None:
            with lock:
                progress(count)

    def verify(shard: ShardRecord) -> None:
        path = directory / shard.file
        if sha256_of(path, report) != shard.sha256:
            raise CraftError(f"{path}: its SHA-256 is not the one in the manifest: it is damaged. {remedy(directory)}")

    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        tasks = [pool.submit(verify, shard) for shard in shards]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # one damaged shard is enough
            raise


def _open_shard(path: Path, shard: ShardRecord, manifest: Manifest) -> ShardReader:
    reader = ShardReader(path)
    if reader.rows != shard.rows:
        raise CraftError(f"{path}: {reader.rows} rows, but the manifest says {shard.rows}. {remedy(path.parent)}")
    found = {name: describe(column) for name, column in reader.columns.items()}
    for name in sorted(found.keys() | manifest.columns.keys()):
        if found.get(name) != manifest.columns.get(name):
            raise CraftError(
                f"{path}: column {name!r} is {found.get(name, 'missing')}, but the manifest declares "
                f"{manifest.columns.get(name, 'none')}. {remedy(path.parent)}"
            )
    return reader
