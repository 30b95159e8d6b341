"""A memory in RAM and on disk. The files are those of an anchor cache without teacher values."""

import hashlib
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lerobot_craft.anchors.build import INPUT
from lerobot_craft.anchors.columns import Column, Columns, Ragged, describe, rows_without_number, take
from lerobot_craft.anchors.loader import require_sound
from lerobot_craft.anchors.manifest import (
    MEMORY_FOLDER,
    DatasetRecord,
    InputFeature,
    Manifest,
    remedy,
    source_notes,
    write_shard,
)
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import Progress, plain_errors, replaced_directory, temporary_path

type SourceKind = Literal["demonstrations", "rollouts", "training"]

ACTION, IS_PAD = "action", "action_is_pad"
_KINDS = {"demonstrations": "demonstrations", "rollouts": "the policy's own rollouts", "training": "training data"}
_OFFSET_BYTES = 8  # per row, for the limits of a ragged column


@dataclass(frozen=True)
class Source:
    """Where frames come from: a dataset, or rollouts of the policy itself.

    Attributes:
        repo_id: Its name; never a path.
        revision: Branch, tag or commit on the Hub; None: not specified.
        fingerprint: Of the dataset's metadata, or of the rollouts' content.
        total_frames: Total number of frames.
        kind: How its frames were made.
        fps: Frames per second.
    """

    repo_id: str
    revision: str | None
    fingerprint: str
    total_frames: int
    kind: SourceKind
    fps: float


@dataclass(frozen=True, eq=False)
class Memory:
    """Frames with their instructions and actions. Immutable.

    Rows are ordered by task, oldest first. Within a task, any prefix is spread over episodes and phases.

    Attributes:
        policy_type: The policy adapter's name for it.
        input_features: How each observation is stored.
        sources: Where frames come from; the column `dataset` indexes them.
        instructions: One per task; the column `instruction` indexes them.
        columns: By name, n rows each: `input.*`, `action` [n, H, A], `action_is_pad` [n, H], and each frame's origin.
        seed: Seed of the choice of frames.
    """

    policy_type: str
    input_features: dict[str, InputFeature]
    sources: tuple[Source, ...]
    instructions: tuple[str, ...]
    columns: Columns
    seed: int = 0

    def __len__(self) -> int:
        return len(self.columns["instruction"])

    def dense(self, name: str) -> Tensor:
        """A column that must not be ragged."""
        column = self.columns[name]
        if isinstance(column, Ragged):
            raise CraftError(f"the memory has a ragged column {name!r} where rows of one shape belong: make it again")
        return column

    def counts(self) -> list[int]:
        """Number of frames per instruction."""
        found: list[int] = torch.bincount(self.dense("instruction").long(), minlength=len(self.instructions)).tolist()
        return found

    def rows_of(self, instruction: str) -> Tensor:
        """Rows of a task, int64 [k]; empty if the instruction is unknown."""
        if instruction not in self.instructions:
            return torch.empty(0, dtype=torch.int64)
        return (self.dense("instruction") == self.instructions.index(instruction)).nonzero().squeeze(1)

    def row_bytes(self) -> Tensor:
        """Bytes of each frame, int64 [n]."""
        total = torch.zeros(len(self), dtype=torch.int64)
        for column in self.columns.values():
            if isinstance(column, Ragged):
                total += column.lengths * column.values.element_size() + _OFFSET_BYTES
            else:
                total += column.nbytes // len(self)
        return total

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return int(self.row_bytes().sum())

    @property
    def num_pictures(self) -> int:
        """Number of camera images: one per frame, camera and history step."""
        steps = [
            feature.shape[0] if len(feature.shape) == 4 else 1
            for feature in self.input_features.values()
            if feature.codec == "png"
        ]
        return len(self) * sum(steps)

    def take(self, rows: Tensor) -> "Memory":
        """Only these rows (int64 [k], k >= 1), in this order; instructions and sources without frames are dropped."""
        columns = take(self.columns, rows)
        kept: dict[str, list[int]] = {}
        for name in ("instruction", "dataset"):
            column = _dense(columns[name])
            kept[name], places = (part.tolist() for part in column.unique(return_inverse=True))
            columns[name] = torch.tensor(places, dtype=column.dtype)
        return replace(
            self,
            instructions=tuple(self.instructions[index] for index in kept["instruction"]),
            sources=tuple(self.sources[index] for index in kept["dataset"]),
            columns=columns,
        )

    def fingerprint(self) -> str:
        """SHA-256 of all frames, their instructions and their sources."""
        digest = hashlib.sha256(repr((self.policy_type, self.instructions, self.sources)).encode())
        for name, column in sorted(self.columns.items()):
            digest.update(repr((name, describe(column))).encode())
            parts = (column.values, column.lengths) if isinstance(column, Ragged) else (column,)
            for part in parts:
                digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


def memory_in(checkpoint: Path) -> Path | None:
    """The memory's folder in a checkpoint's `pretrained_model`; None if there is none."""
    directory = checkpoint / MEMORY_FOLDER
    return directory if directory.is_dir() else None


def read_memory(directory: Path, verify: bool = True, progress: Progress | None = None) -> Memory:
    """Read a memory from its folder, or raise an error that says what is wrong with it.

    Args:
        directory: `.../pretrained_model/craft_memory`.
        verify: Check checksums; otherwise only presence, sizes and structure.
        progress: Called with the number of newly verified bytes.
    """
    store = AnchorStore.open(directory, verify=verify, progress=progress)
    manifest = store.manifest
    if manifest.kind != "memory":
        raise CraftError(
            f"{directory} is a cache of {manifest.kind} anchors, not a memory: give a checkpoint that has a "
            f"{MEMORY_FOLDER} folder, or use the cache as --craft.anchor_cache_dir"
        )
    require_sound(store)
    columns = store.take(torch.arange(len(store)))
    for name, column in columns.items():
        values = column.values if isinstance(column, Ragged) else column
        if values.is_floating_point() and (bad := rows_without_number(column)):
            raise CraftError(f"{directory}: frame {bad[0]} holds NaN or infinity in {name!r}. {remedy(directory)}")
    return Memory(
        policy_type=manifest.policy_type,
        input_features=manifest.input_features,
        sources=tuple(
            Source(record.repo_id, record.revision, record.fingerprint, record.total_frames, note.kind, note.fps)
            for record, note in zip(manifest.datasets, source_notes(manifest), strict=True)
        ),
        instructions=tuple(manifest.instructions),
        columns=columns,
        seed=manifest.seed,
    )


def write_memory(memory: Memory, directory: Path) -> None:
    """Write a memory into its folder. After a kill, the previous memory or this one is there."""
    with plain_errors(directory), replaced_directory(directory) as temporary:
        shard = write_shard(temporary, 0, memory.columns)
        dataset, frame = memory.dense("dataset"), memory.dense("frame")
        Manifest(
            kind="memory",
            policy_type=memory.policy_type,
            teacher={},
            values={"sources": [{"kind": source.kind, "fps": float(source.fps)} for source in memory.sources]},
            dtype="float32",
            autocast=None,
            anchor_source="dataset",
            inputs="embedded",
            input_features=memory.input_features,
            datasets=[
                DatasetRecord(
                    source.repo_id,
                    source.revision,
                    None,
                    source.fingerprint,
                    source.total_frames,
                    sorted(frame[dataset == index].tolist()),
                )
                for index, source in enumerate(memory.sources)
            ],
            instructions=list(memory.instructions),
            counts=memory.counts(),
            scales=[],
            seed=memory.seed,
            num_anchors=len(memory),
            columns={name: describe(column) for name, column in sorted(memory.columns.items())},
            shards=[shard],
        ).save(temporary)


def remove_memory(directory: Path) -> None:
    """Remove a memory from its checkpoint. After a kill, it is whole or gone."""
    temporary = temporary_path(directory)
    with plain_errors(directory):
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed write
        directory.rename(temporary)
        shutil.rmtree(temporary)


def contents(memory: Memory) -> list[str]:
    """Describe a memory, one line per dataset: frames, pictures, kind of source."""
    dataset = memory.dense("dataset").tolist()
    pictures = memory.num_pictures // len(memory)
    found = []
    for index, source in enumerate(memory.sources):
        frames = dataset.count(index)
        plural = "" if frames == 1 else "s"
        found.append(
            f"{frames} frame{plural} ({frames * pictures} pictures) of {source.repo_id}, {_KINDS[source.kind]}"
        )
    return found


def picture_shape(feature: InputFeature) -> tuple[int, int]:
    """Height and width of a stored image."""
    return feature.shape[-2], feature.shape[-1]


def input_column(name: str) -> str:
    """Column name of an observation."""
    return f"{INPUT}{name}"


def _dense(column: Column) -> Tensor:
    if isinstance(column, Ragged):
        raise TypeError("expected a column with rows of one shape")
    return column
