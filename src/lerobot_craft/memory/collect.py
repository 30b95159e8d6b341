"""Choose frames of old tasks and put them into a memory: from a LeRobotDataset, or from the policy's own rollouts.

Some frames of a memory are only measured. A frame shows whether a skill was kept only if no frame of its episode is
trained on. Frames between trained frames of the same episode gave a drift of 0.06 where fresh episodes gave 1.6
(docs/decisions/0033).
"""

import hashlib
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
from lerobot_craft.anchors.plan import choose_frames, spread
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import (
    FrameTable,
    RawBatch,
    dataset_fingerprint,
    frame_numbers,
    frame_success,
    frame_table,
    instructions,
)
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.lerobot_api.preload import check_numbers
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.lerobot_api.rollouts import PlayedEpisode
from lerobot_craft.memory.format import ACTION, IS_PAD, Memory, Source, SourceKind, input_column
from lerobot_craft.policies import adapter_for

type Ints = npt.NDArray[np.int64]

# Maximum number of a task's frames kept out of training: 16, and one in five if the episodes allow.
_AT_MOST, _ONE_OF = 16, 5
_FEWEST = 3  # a task with fewer frames keeps none out


def choose_in_task(table: FrameTable, n: int, seed: list[int]) -> Ints:
    """At most n rows of one task, spread over episodes and phases.

    If there are few episodes, one of them provides only held-out frames, and all others are trained on.
    """
    episodes = np.unique(table.episode)
    measured = wanted(n)
    if n >= len(table) or len(episodes) == 1 or n <= measured * len(episodes):
        return choose_frames(table, n, seed)
    rng = np.random.default_rng([*seed, 1])
    apart = table.episode == rng.choice(episodes)
    few, many = np.flatnonzero(apart), np.flatnonzero(~apart)
    few = few[choose_frames(table.take(few), measured, seed)]
    many = many[choose_frames(table.take(many), n - len(few), seed)]
    groups = np.repeat([0, 1], [len(few), len(many)])
    rows: Ints = np.concatenate([few, many])[spread(groups, rng)]
    return rows


def kept_out(memory: Memory) -> Tensor:
    """Which frames are only measured, bool [n]: whole episodes of each task, those with the fewest frames first.

    A fifth of a task's frames, at most 16, but at least one episode. If a task has a single episode, a fifth of its
    frames, spread over it. None if a task has fewer than three frames.
    """
    apart = torch.zeros(len(memory), dtype=torch.bool)
    episodes = episodes_of(memory)
    for task in memory.instructions:
        rows = memory.rows_of(task).numpy()
        if len(rows) >= _FEWEST:
            apart[torch.from_numpy(_measured(rows, episodes[rows]))] = True
    return apart


def wanted(frames: int) -> int:
    """How many of a task's frames should be held out."""
    return min(max(1, round(frames / _ONE_OF)), _AT_MOST)


def episodes_of(memory: Memory) -> Ints:
    """An episode number for each frame [n]; unique across sources."""
    pairs = torch.stack([memory.dense("dataset").long(), memory.dense("episode").long()])  # [2, n]
    numbers: Ints = pairs.unique(dim=1, return_inverse=True)[1].numpy()
    return numbers


def _measured(rows: Ints, episodes: Ints) -> Ints:
    """Rows of one task that are held out."""
    names, sizes = np.unique(episodes, return_counts=True)
    count = wanted(len(rows))
    if len(names) == 1:
        within: Ints = np.linspace(0, len(rows) - 1, count + 2).round().astype(np.int64)[1:-1]
        return rows[within]
    order = np.argsort(sizes, kind="stable")
    # As many whole episodes as fit, at least one, never all.
    fitting = int(np.searchsorted(np.cumsum(sizes[order]), count, side="right"))
    chosen = order[: min(max(1, fitting), len(names) - 1)]
    measured: Ints = rows[np.isin(episodes, names[chosen])]
    return measured


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


def from_rollouts(
    episodes: Sequence[PlayedEpisode],
    config: Any,
    *,
    name: str,
    fps: float,
    frames_per_task: int,
    seed: int,
    rename_map: Mapping[str, str] | None = None,
    successful_only: bool = False,
) -> Memory:
    """A memory of played episodes, with the same number of frames per task.

    Args:
        episodes: Of one or more tasks, each with its instruction.
        config: The policy's config.
        name: Where they were played.
        fps: Frames per second.
        frames_per_task: Maximum per task.
        seed: Seed of the choice.
        rename_map: The environment's observation names -> the policy's.
        successful_only: Skip failed episodes.

    Raises:
        CraftError: No episode is left, or an observation that the policy reads is missing.
    """
    kept = [episode for episode in episodes if episode.success or not successful_only]
    if not kept:
        raise CraftError(
            f"none of the {len(episodes)} rollouts succeeded, so there is nothing to remember: leave out "
            "--successful_only, or play more with --episodes"
        )
    tasks = list(dict.fromkeys(episode.instruction for episode in kept))
    lengths = np.asarray([len(episode.actions) for episode in kept])
    number = np.repeat(np.arange(len(kept)), lengths)  # episode index of each frame
    position = np.concatenate([np.arange(length) for length in lengths])
    table = FrameTable(
        task=np.asarray([tasks.index(episode.instruction) for episode in kept])[number],
        episode=number,
        position=position,
        length=lengths[number],
    )
    rows = choose(table, np.arange(len(table)), frames_per_task, seed)
    frames = [rollout_sample(kept[number[row]], int(position[row]), config, rename_map or {}) for row in rows]
    batch = {name: torch.stack([frame[name] for frame in frames]) for name in frames[0]}
    places = {
        "instruction": table.task[rows],
        "frame": rows,
        "episode": table.episode[rows],
        "position": position[rows],
        "length": table.length[rows],
        "success": np.asarray([kept[index].success for index in number[rows]]),
    }
    source = Source(name, None, _fingerprint(kept), len(table), "rollouts", fps)
    return as_memory([batch], places, config, source, tasks, seed)


def rollout_sample(
    episode: PlayedEpisode, position: int, config: Any, rename_map: Mapping[str, str]
) -> dict[str, Tensor]:
    """One frame as a dataset would give it for this policy: history, executed action chunk, padding."""
    named = {rename_map.get(name, name): values for name, values in episode.observations.items()}
    missing = [name for name in config.input_features if name not in named and "empty_camera" not in name]
    if missing:
        raise CraftError(
            f"the environment shows no {missing[0]}, which this {config.type} reads (it shows "
            f"{', '.join(sorted(episode.observations))}): translate its names with --rename_map"
        )
    last = len(episode.actions) - 1
    frame = {}
    for name in config.input_features:
        if name in named:
            past = config.observation_delta_indices
            frame[name] = named[name][position if past is None else _within(position, past, last)[0]]
    steps, is_pad = _within(position, config.action_delta_indices, last)
    return frame | {ACTION: episode.actions[steps], IS_PAD: is_pad}


def _within(position: int, deltas: Sequence[int], last: int) -> tuple[Tensor, Tensor]:
    """Steps [D] of an episode around a position, clamped to it, and which of them [D] were outside."""
    wanted = position + torch.tensor(list(deltas))
    return wanted.clamp(0, last), (wanted < 0) | (wanted > last)


def _fingerprint(episodes: Sequence[PlayedEpisode]) -> str:
    digest = hashlib.sha256()
    for episode in episodes:
        digest.update(episode.instruction.encode())
        digest.update(episode.actions.numpy().tobytes())
    return digest.hexdigest()
