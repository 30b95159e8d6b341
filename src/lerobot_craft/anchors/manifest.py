"""The manifest: what a cache or a memory says about itself, and checks of these claims.

It contains no time and no machine name: the same inputs give the same bytes.
"""

import hashlib
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from lerobot_craft.anchors.columns import ColumnSpec
from lerobot_craft.anchors.files import (
    checksum_path,
    plain_errors,
    read_bytes,
    read_checksum,
    write_atomically,
    write_checksum,
)
from lerobot_craft.anchors.modes.registry import mode_named
from lerobot_craft.anchors.retained import scale_problems
from lerobot_craft.anchors.shards import STORABLE_DTYPES, ShardRecord, shard_name
from lerobot_craft.anchors.strict_json import StrictJSONError, decode, parse_object, to_json
from lerobot_craft.errors import CraftError

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
        return [f"kind: {error}"]
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
