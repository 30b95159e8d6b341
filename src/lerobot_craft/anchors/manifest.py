"""The files of a cache: shards, and the manifest, which says what a cache or a memory is; and checks of its claims.

A shard has up to some thousand rows of anchors in one safetensors file, memory-mapped. A dense column is one tensor. A
ragged column is two: `name` [total, ...] and `name.offsets` (int64 [n + 1]).

The manifest contains no time and no machine name: the same inputs give the same bytes.
"""

import hashlib
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, ColumnSpec, Ragged, num_rows, take
from lerobot_craft.anchors.retained import mode_named, scale_problems
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import (
    Progress,
    checksum_path,
    plain_errors,
    read_bytes,
    read_checksum,
    require_file,
    sha256_of,
    write_atomically,
    write_checksum,
)
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json

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


MANIFEST_FILE = "manifest.json"
MEMORY_FOLDER = "craft_memory"
BUILD_FILE = "build.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE_NAMES = frozenset(str(dtype).removeprefix("torch.") for dtype in STORABLE_DTYPES)
FLOAT_NAMES = frozenset(
    str(dtype).removeprefix("torch.") for dtype in STORABLE_DTYPES if torch.empty(0, dtype=dtype).is_floating_point()
)


@dataclass(frozen=True)
class DatasetRecord:
    """A dataset that frames were taken from, with its identity."""

    repo_id: str
    revision: str | None
    root: str | None
    fingerprint: str
    total_frames: int
    frames: list[int]


@dataclass(frozen=True)
class InputFeature:
    """How an observation is stored: images as `png` (uint8, lossless), the rest as `raw`; `shape` is per anchor."""

    codec: Literal["png", "raw"]
    shape: list[int]


@dataclass(frozen=True)
class Scale:
    """The unit of an instruction's drift: a value per loss type, and the number of anchors it was measured on."""

    source: Literal["demonstrations", "self", "spread"]
    n: int
    values: dict[str, float]


@dataclass(frozen=True)
class SourceNote:
    """A memory's note on one dataset, beside its `DatasetRecord`: how frames were made, and frames per second."""

    kind: Literal["demonstrations", "rollouts", "training"]
    fps: float


@dataclass(frozen=True)
class _MemoryValues:
    """`Manifest.values` of a memory: one note per dataset."""

    sources: list[SourceNote]


@dataclass(frozen=True)
class Manifest:
    """Content and origin of a cache, or of a memory, which is a cache without teacher values.

    Attributes:
        kind: Name of the retention mode; `memory`: observations, instructions and executed actions only.
        policy_type: lerobot's name of the policy.
        teacher: Fingerprints by part, e.g. `weights`, `stats`, `tokenizers`.
        values: How the teacher's values were taken (layers, pooling, top_k, ...), as JSON.
        dtype: Dtype of the teacher's values.
        autocast: Autocast dtype of the teacher; None: no autocast.
        anchor_source: Frames of the old datasets, cross pairs of new frames and old instructions, or both.
        inputs: Whether observations are in the cache or read from the datasets.
        input_features: How each observation is stored.
        datasets: Where frames came from.
        instructions: The old instructions; anchors refer to them by position.
        counts: Anchors per instruction.
        scales: One per instruction.
        seed: Seed of the choice of anchors.
        num_anchors: Rows in all shards.
        columns: Content of the shards.
        shards: In order; all but the last have the same number of rows.
        schema: Version of this format.
    """

    SCHEMA: ClassVar[int] = 1

    kind: str
    policy_type: str
    teacher: dict[str, str]
    values: dict[str, Any]
    dtype: str
    autocast: str | None
    anchor_source: Literal["dataset", "cross", "both"]
    inputs: Literal["embedded", "reference"]
    input_features: dict[str, InputFeature]
    datasets: list[DatasetRecord]
    instructions: list[str]
    counts: list[int]
    scales: list[Scale]
    seed: int
    num_anchors: int
    columns: dict[str, ColumnSpec]
    shards: list[ShardRecord]
    schema: int = SCHEMA

    def to_bytes(self) -> bytes:
        """The bytes of `manifest.json`. Raises an error if the content would not survive reading back."""
        data = to_json(self)
        if Manifest.from_bytes(data) != self:
            raise StrictJSONError("the manifest holds values that JSON does not keep, such as tuples")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Parse and check `manifest.json`; a StrictJSONError names the wrong field."""
        content = parse_object(data)
        schema = content.get("schema")
        if type(schema) is not int:
            raise StrictJSONError("schema: missing, or not a number")
        if schema != cls.SCHEMA:
            remedy = (
                "take a newer one with `git pull && make setup` in the clone of CRaFT"
                if schema > cls.SCHEMA
                else "rebuild the cache with `craft cache build`"
            )
            raise StrictJSONError(f"schema: {schema}, while this release of lerobot-craft reads {cls.SCHEMA}; {remedy}")
        manifest = decode(cls, content)
        for problem in _problems(manifest):
            raise StrictJSONError(problem)
        return manifest

    def save(self, directory: Path) -> None:
        """Finish a cache: it is complete once `manifest.json` exists.

        Build files are then removed, because the manifest contains their information.
        """
        path = directory / MANIFEST_FILE
        data = self.to_bytes()
        write_checksum(path, hashlib.sha256(data).hexdigest())
        write_atomically(path, data)
        self.clear_build(directory)

    def clear_build(self, directory: Path) -> None:
        """Remove `build.json` and the shards' checksum files, including those left by a killed build."""
        for leftover in (directory / BUILD_FILE, *(checksum_path(directory / shard.file) for shard in self.shards)):
            with plain_errors(leftover):
                leftover.unlink(missing_ok=True)

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read the manifest of a finished cache after checking its checksum."""
        path = directory / MANIFEST_FILE
        _require_finished(directory)
        data = read_bytes(path)
        if hashlib.sha256(data).hexdigest() != read_checksum(path):
            raise CraftError(
                f"{path}: its SHA-256 is not the one in {checksum_path(path).name}: it was damaged or edited. "
                f"{remedy(directory)}"
            )
        try:
            return cls.from_bytes(data)
        except StrictJSONError as error:
            raise CraftError(f"{path}: {error}.") from error


def remedy(directory: Path) -> str:
    """How to fix a damaged cache or memory; the folder's name tells which it is."""
    if directory.name.startswith(MEMORY_FOLDER):
        return (
            "Copy the checkpoint again; or remove this folder and make the memory again with "
            "`craft remember CHECKPOINT --dataset.repo_id=NAME`."
        )
    return "Copy the cache again, or rebuild it with `craft cache build`."


def _require_finished(directory: Path) -> None:
    path = directory / MANIFEST_FILE
    with plain_errors(directory):
        names = {entry.name for entry in directory.iterdir()} if directory.exists() else None
    if names is None:
        raise CraftError(f"{directory}: there is no such directory. Build a cache with `craft cache build`.")
    if path.name in names:
        return
    if BUILD_FILE in names or any(name.startswith("shard-") for name in names):
        raise CraftError(
            f"{directory}: the cache is unfinished. Run the same `craft cache build` command again; it goes on where "
            "it stopped."
        )
    raise CraftError(f"{directory}: not a cache of anchors, it has no {path.name}. Build one with `craft cache build`.")


def _problems(manifest: Manifest) -> list[str]:
    """Contradictions in a manifest whose types are right; each begins with the field."""
    return [
        *_shard_problems(manifest),
        *_instruction_problems(manifest),
        *_dataset_problems(manifest),
        *_column_problems(manifest),
        *_value_problems(manifest),
    ]


def _shard_problems(manifest: Manifest) -> list[str]:
    found = []
    shards = manifest.shards
    for i, shard in enumerate(shards):
        # Also rejects paths: a manifest must not make us read elsewhere.
        if shard.file != shard_name(i):
            found.append(f"shards[{i}].file: expected {shard_name(i)}, got {shard.file!r:.80}")
        if not _SHA256.fullmatch(shard.sha256):
            found.append(f"shards[{i}].sha256: expected 64 hexadecimal digits")
        if shard.rows < 1 or shard.bytes < 1:
            found.append(f"shards[{i}]: rows and bytes must be positive")
        if shard.rows != shards[0].rows and not (i == len(shards) - 1 and shard.rows < shards[0].rows):
            found.append(f"shards[{i}].rows: {shard.rows}; only the last shard may have fewer than {shards[0].rows}")
    if sum(shard.rows for shard in shards) != manifest.num_anchors:
        found.append(f"num_anchors: {manifest.num_anchors}, but the shards have {sum(s.rows for s in shards)} rows")
    if not shards:
        found.append("shards: a cache has at least one")
    return found


def _instruction_problems(manifest: Manifest) -> list[str]:
    found = []
    for name, items in (("counts", manifest.counts), ("scales", manifest.scales)):
        if name == "scales" and manifest.kind == "memory":
            continue  # a memory has no teacher, so no unit
        if len(items) != len(manifest.instructions):
            found.append(f"{name}: {len(items)} for {len(manifest.instructions)} instructions")
    if min(manifest.counts, default=0) < 0 or sum(manifest.counts) != manifest.num_anchors:
        found.append(f"counts: expected numbers that sum to {manifest.num_anchors} anchors")
    if len(set(manifest.instructions)) != len(manifest.instructions):
        found.append("instructions: the same one twice")
    found += [f"scales[{i}].n: {scale.n} is negative" for i, scale in enumerate(manifest.scales) if scale.n < 0]
    for i, scale in enumerate(manifest.scales):
        found += scale_problems(f"scales[{i}].values", scale.values)
    return found


def _dataset_problems(manifest: Manifest) -> list[str]:
    return [
        f"datasets[{i}].frames: expected numbers from 0 to {record.total_frames - 1}"
        for i, record in enumerate(manifest.datasets)
        if record.frames and not (min(record.frames) >= 0 and max(record.frames) < record.total_frames)
    ]


def _column_problems(manifest: Manifest) -> list[str]:
    found = [] if manifest.columns else ["columns: a cache has at least one"]
    for name, spec in manifest.columns.items():
        if spec.dtype not in _DTYPE_NAMES:
            found.append(f"columns.{name}.dtype: {spec.dtype!r:.80} is not one a cache can hold")
    for kind, entries in (("columns", manifest.columns), ("input_features", manifest.input_features)):
        for name, entry in entries.items():
            if any(size < 0 for size in entry.shape):
                found.append(f"{kind}.{name}.shape: {entry.shape} has a negative size")
    for field, dtype in (("dtype", manifest.dtype), ("autocast", manifest.autocast)):
        if dtype is not None and dtype not in FLOAT_NAMES:
            found.append(f"{field}: {dtype!r:.80} is none of {', '.join(sorted(FLOAT_NAMES))}")
    return found


def _value_problems(manifest: Manifest) -> list[str]:
    if manifest.kind == "memory":
        return _memory_problems(manifest)
    try:
        mode = mode_named(manifest.kind)
    except CraftError as error:
        return [f"kind: {error.text}"]
    known = mode.manifest_values
    content = {field.name: manifest.values[field.name] for field in fields(known) if field.name in manifest.values}
    try:
        return mode.problems(decode(known, content, "values"))
    except StrictJSONError as error:
        return [str(error)]


def _memory_problems(manifest: Manifest) -> list[str]:
    """Claims that a memory must not make: teacher values, or dataset paths on somebody's machine."""
    found = [
        f"{name}: a memory has none"
        for name, content in (("teacher", manifest.teacher), ("scales", manifest.scales))
        if content
    ]
    if manifest.inputs != "embedded" or manifest.anchor_source != "dataset":
        found.append("inputs: a memory holds frames of datasets itself (embedded)")
    found += [
        f"datasets[{i}].root: a memory names no place on a machine"
        for i, record in enumerate(manifest.datasets)
        if record.root is not None
    ]
    try:
        notes = decode(_MemoryValues, manifest.values, "values").sources
    except StrictJSONError as error:
        return [*found, str(error)]
    if len(notes) != len(manifest.datasets):
        found.append(f"values.sources: {len(notes)} for {len(manifest.datasets)} datasets")
    if any(note.fps <= 0 for note in notes):
        found.append("values.sources: frames per second must be positive")
    return found


def source_notes(manifest: Manifest) -> list[SourceNote]:
    """A memory's notes on its datasets, one each."""
    return decode(_MemoryValues, manifest.values, "values").sources
