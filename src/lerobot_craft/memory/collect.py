"""Choose frames of a LeRobotDataset and put them into a memory."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Columns, concatenate
from lerobot_craft.anchors.images import encode_images
from lerobot_craft.anchors.manifest import InputFeature
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import (
    RawBatch,
    dataset_fingerprint,
    frame_numbers,
    frame_success,
    frame_table,
    instructions,
)
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.lerobot_api.preload_columns import check_numbers
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.lerobot_api.stored_frames import FrameTable
from lerobot_craft.memory.format import ACTION, IS_PAD, Memory, Source, SourceKind, input_column
from lerobot_craft.memory.kept_out import choose_in_task
from lerobot_craft.policies import adapter_for

_READ_TOGETHER = 32
_TYPES = {"instruction": np.int32, "success": np.int8}


def from_dataset(
    dataset: Any,
    config: Any,
    *,
    kind: SourceKind,
    frames_per_task: int,
    seed: int,
    revision: str | None = None,
    rename_map: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
    successful_only: bool = False,
) -> Memory:
    """A memory with the same number of frames from each task of a dataset.

    Args:
        dataset: From `open_dataset` with the policy's config, so that samples have its history and actions.
        config: The policy's config, as in the checkpoint.
        kind: How the frames were made.
        frames_per_task: Maximum per task.
        seed: Seed of the choice.
        revision: The revision asked for.
        rename_map: lerobot's `--rename_map`: the dataset's names -> the policy's.
        only: Instructions to take; None: all.
        successful_only: Skip episodes that are known to have failed.

    Raises:
        CraftError: The dataset is of another robot, lacks a feature, or has none of the requested frames.
    """
    adapter = adapter_for(config)
    require_features(
        config,
        dataset.meta.features,
        dataset=dataset.repo_id,
        masks_missing_cameras=adapter.masks_missing_cameras(SimpleNamespace(config=config)),
        rename_map=rename_map or {},
        actions=True,
    )
    check_numbers(dataset, config, rename_map or {}, "--dataset.episodes")
    table, names, success = frame_table(dataset), instructions(dataset.meta), frame_success(dataset)
    wanted = np.flatnonzero(~((success == 0) & successful_only))
    if only is not None:
        wanted = wanted[np.isin(table.task[wanted], [i for i, name in enumerate(names) if name in only])]
    rows = choose(table, wanted, frames_per_task, seed)
    if not len(rows):
        what = "successful episode" if successful_only else "frame of the tasks that were asked for"
        raise CraftError(f"the dataset {dataset.repo_id} has no {what}, so there is nothing to remember")
    tasks, instruction = np.unique(table.task[rows], return_inverse=True)
    source = Source(
        plain_name(dataset.repo_id),
        revision,
        dataset_fingerprint(dataset),
        dataset.meta.total_frames,
        kind,
        float(dataset.meta.fps),
    )
    places: dict[str, npt.NDArray[Any]] = {
        "instruction": instruction,
        "frame": frame_numbers(dataset)[rows],
        "episode": table.episode[rows],
        "position": table.position[rows],
        "length": table.length[rows],
        "success": success[rows],
    }
    frames = [_under_policy_names(batch, rename_map or {}) for batch in _read(dataset, rows)]
    return as_memory(frames, places, config, source, [names[task] for task in tasks], seed)


def as_memory(
    batches: Iterable[RawBatch],
    places: Mapping[str, npt.NDArray[Any]],
    config: Any,
    source: Source,
    tasks: Sequence[str],
    seed: int,
) -> Memory:
    """A memory from frames that are already read.

    Args:
        batches: Frames in order, under the policy's names: observations, `action` [B, H, A] and `action_is_pad` [B, H].
        places: Of all frames [n]: `instruction` (into `tasks`), `frame`, `episode`, `position`, `length`, `success`.
        config: The policy's config.
        source: The source of all frames.
        tasks: Instructions.
        seed: Seed of the choice.
    """
    parts: list[Columns] = []
    features: dict[str, InputFeature] = {}
    for raw in batches:
        columns: Columns = {ACTION: raw[ACTION].float(), IS_PAD: raw[IS_PAD].bool()}
        for name in config.input_features:
            if name not in raw:
                continue  # a camera that the policy masks
            values: Tensor = raw[name]
            is_picture = values.dtype == torch.uint8
            features[name] = InputFeature("png" if is_picture else "raw", list(values.shape[1:]))
            columns[input_column(name)] = encode_images(values) if is_picture else values
        parts.append(columns)
    columns = concatenate(parts) | {
        "cross": torch.zeros(len(places["frame"]), dtype=torch.bool),
        "dataset": torch.zeros(len(places["frame"]), dtype=torch.int32),
        **{name: torch.from_numpy(values.astype(_TYPES.get(name, np.int64))) for name, values in places.items()},
    }
    return Memory(adapter_for(config).policy_type, features, (source,), tuple(tasks), columns, seed)


def plain_name(repo_id: str) -> str:
    """A dataset's name without local directories: lerobot also accepts a path as a name."""
    return PurePath(repo_id).name if PurePath(repo_id).is_absolute() else repo_id


def choose(table: FrameTable, wanted: npt.NDArray[np.int64], frames_per_task: int, seed: int) -> npt.NDArray[np.int64]:
    """For each task: at most `frames_per_task` of the wanted rows, task by task."""
    chosen = []
    for task in np.unique(table.task[wanted]):
        own = wanted[table.task[wanted] == task]
        chosen.append(own[choose_in_task(table.take(own), frames_per_task, [seed, int(task) + 1])])
    return np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)


def _read(dataset: Any, rows: npt.NDArray[np.int64]) -> Iterator[RawBatch]:
    batches = [(0, rows[start : start + _READ_TOGETHER]) for start in range(0, len(rows), _READ_TOGETHER)]
    yield from read_batches([dataset], batches)


def _under_policy_names(raw: RawBatch, rename_map: Mapping[str, str]) -> RawBatch:
    return {rename_map.get(name, name): values for name, values in raw.items()}
