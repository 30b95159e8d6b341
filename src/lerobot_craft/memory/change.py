"""Operations on memories: join two, forget a task, reduce the size. Each returns a new memory."""

import difflib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Columns, concatenate, take
from lerobot_craft.anchors.manifest import InputFeature
from lerobot_craft.anchors.plan import plain
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import FrameTable
from lerobot_craft.memory.collect import choose_in_task, episodes_of
from lerobot_craft.memory.format import ACTION, Memory, Source, picture_shape

_LISTED = 12  # most instructions listed in a message


def extended(old: Memory | None, added: Memory, *, frames_per_task: int, max_bytes: int) -> Memory:
    """A memory with the frames of both.

    Tasks in both get at most `frames_per_task` frames of both, spread over all episodes. Others keep theirs if
    possible.

    Args:
        old: The existing memory, or None.
        added: New frames for the same policy.
        frames_per_task: For each task that is new or gets more frames.
        max_bytes: Limit for all frames together; see `thinned`.

    Raises:
        CraftError: Policies, cameras or resolutions differ, or one frame per task does not fit.
    """
    both = added if old is None else _joined(old, added)
    kept = []
    for number, instruction in enumerate(both.instructions):
        rows = both.rows_of(instruction)
        if old is None or instruction in added.instructions:
            rows = _chosen(both, rows, frames_per_task, [both.seed, number + 1])
        kept.append(rows)
    return thinned(both.take(torch.cat(kept)), max_bytes)


def forgotten(memory: Memory, instruction: str) -> Memory | None:
    """The memory without a task; None if that was the last one.

    Raises:
        CraftError: The memory has no such task.
    """
    if instruction not in memory.instructions:
        raise CraftError(
            f"the memory has no task {instruction!r}, so there is nothing to forget: "
            f"{did_you_mean(instruction, memory.instructions)}"
        )
    rows = (memory.dense("instruction") != memory.instructions.index(instruction)).nonzero().squeeze(1)
    return memory.take(rows) if len(rows) else None


def thinned(memory: Memory, max_bytes: int) -> Memory:
    """At most `max_bytes` of frames. The newest task is thinned first; every task keeps at least one frame.

    Rounds go from the newest to the oldest task, and each task loses at most half of its frames per round.

    Raises:
        CraftError: One frame of each task does not fit.
    """
    sizes = memory.row_bytes()
    rows = [memory.rows_of(instruction) for instruction in memory.instructions]
    fewest = sum(int(sizes[of_task[0]]) for of_task in rows)
    if fewest > max_bytes:
        raise CraftError(
            f"one frame of each of the {len(rows)} tasks takes {fewest} bytes, more than the {max_bytes} that the "
            "memory may have: allow more bytes, or forget a task with `craft remember CHECKPOINT --forget=INSTRUCTION`"
        )
    too_much = int(sizes.sum()) - max_bytes
    while too_much > 0:
        for task in reversed(range(len(rows))):
            few = max(1, len(rows[task]) // 2)
            while too_much > 0 and len(rows[task]) > few:
                too_much -= int(sizes[rows[task][-1]])
                rows[task] = rows[task][:-1]
    return memory.take(torch.cat(rows))


def did_you_mean(instruction: str, known: Sequence[str]) -> str:
    """Suggest the known instruction that was probably meant, or list the known ones."""
    as_written = {plain(name): name for name in reversed(known)}
    near = difflib.get_close_matches(plain(instruction), as_written, n=1)
    if not near:  # similar words in another order or with others around them
        words = {name: set(name.split()) & set(plain(instruction).split()) for name in as_written}
        rare = {name: sum(1 / sum(word in of for of in words.values()) for word in words[name]) for name in words}
        near = [name for name, score in rare.items() if score >= 1 and score == max(rare.values())][:1]
    if near:
        return f"did you mean {as_written[near[0]]!r}?"
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"known are {'; '.join(map(repr, known[:_LISTED]))}{more}"


def _joined(old: Memory, added: Memory) -> Memory:
    """Rows of the old memory, then those of the other that the old one lacks."""
    _require_alike(old, added)
    sources = _union(old.sources, added.sources)
    instructions = _union(old.instructions, added.instructions)
    parts = [_renumbered(memory, sources, instructions) for memory in (old, added)]
    known = set(_places(parts[0]))
    fresh = [row for row, place in enumerate(_places(parts[1])) if place not in known]
    if not fresh:
        return replace(old, sources=tuple(sources), instructions=tuple(instructions), columns=parts[0]).take(
            torch.arange(len(old))
        )
    columns = concatenate([parts[0], take(parts[1], torch.tensor(fresh))])
    return Memory(old.policy_type, old.input_features, tuple(sources), tuple(instructions), columns, added.seed)


def _union[T](first: Sequence[T], second: Sequence[T]) -> list[T]:
    return list(dict.fromkeys([*first, *second]))


def _renumbered(memory: Memory, sources: Sequence[Source], instructions: Sequence[str]) -> Columns:
    """The memory's columns, with sources and instructions as positions in the given lists."""
    columns = dict(memory.columns)
    for name, own, common in (
        ("dataset", memory.sources, list(sources)),
        ("instruction", memory.instructions, list(instructions)),
    ):
        numbers = torch.tensor([common.index(item) for item in own])  # type: ignore[arg-type]
        column = memory.dense(name)
        columns[name] = numbers[column.long()].to(column.dtype)
    return columns


def _places(columns: Columns) -> list[tuple[int, int]]:
    """(source, frame) of each row."""
    dataset, frame = columns["dataset"], columns["frame"]
    return list(zip(dataset.tolist(), frame.tolist(), strict=True))  # type: ignore[union-attr]


def _chosen(memory: Memory, rows: Tensor, n: int, seed: list[int]) -> Tensor:
    """At most n of a task's rows, spread over episodes and phases."""
    if len(rows) <= n:
        return rows
    columns = {name: memory.dense(name)[rows].numpy().astype(np.int64) for name in ("position", "length")}
    table = FrameTable(task=np.zeros(len(rows), np.int64), episode=episodes_of(memory)[rows.numpy()], **columns)
    return rows[torch.from_numpy(choose_in_task(table, n, seed))]


def _require_alike(old: Memory, added: Memory) -> None:
    if old.policy_type != added.policy_type:
        raise CraftError(
            f"the memory is of a {old.policy_type} and these frames are for a {added.policy_type}: a memory belongs to "
            "one policy. Start another one with `craft remember CHECKPOINT` in the other policy's checkpoint."
        )
    missing = sorted(old.input_features.keys() ^ added.input_features.keys())
    if missing:
        has, lacks = ("the memory", "the new frames") if missing[0] in old.input_features else ("the new frames", "it")
        raise CraftError(
            f"{has} have {missing[0]} and {lacks} do not: frames of one memory have the same cameras and states. "
            "Use a dataset with the same features, or start the memory anew (remove its folder)."
        )
    for name, feature in old.input_features.items():
        other = added.input_features[name]
        if feature != other:
            what = f"{_size(feature)} in the memory and {_size(other)} in the new frames"
            raise CraftError(
                f"{name} is {what}: frames of one memory have one size. Use data of the same resolution and robot, or "
                "start the memory anew (remove its folder)."
            )
    if (found := old.dense(ACTION).shape[1:]) != (given := added.dense(ACTION).shape[1:]):
        raise CraftError(
            f"actions are {tuple(found)} (steps, width) in the memory and {tuple(given)} in the new frames: they are "
            "of another robot or of a policy with another chunk size. Start the memory anew (remove its folder)."
        )


def _size(feature: InputFeature) -> str:
    if feature.codec == "png":
        height, width = picture_shape(feature)
        return f"{width} x {height} pixels"
    return f"of shape {feature.shape}"
