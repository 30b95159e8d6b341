"""From frames of datasets to anchors: the datasets that a cache refers to, the instruction and the state of each."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.cross import (
    Stats,
    anchor_generator,
    draw_states,
    end_histories_at,
    jitter_states,
    move_towards,
)
from lerobot_craft.anchors.manifest import DatasetRecord, Manifest
from lerobot_craft.anchors.plan import Plan
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch, fingerprint_in, local_copies, open_dataset
from lerobot_craft.lerobot_api.reading import read_batches

STATE = "observation.state"
_LEAVE_STATES = "To leave states as they are, set --drawn_states=0, --walked_states=0 and --state_jitter=0."


def open_referenced(
    manifest: Manifest, policy_config: Any = None, named: Sequence[tuple[str, str | None]] = ()
) -> list[Any]:
    """The datasets that hold a cache's images, in the manifest's order; none where the cache holds them itself.

    A manifest may say anything, so nothing is downloaded for it, and of a directory only the metadata is read until
    these have the fingerprint that the cache was built with.

    Args:
        manifest: Of the cache.
        policy_config: Decides which past frames belong to an observation.
        named: Datasets that the user names (repo_id, directory): these are tried before what the manifest says.

    Raises:
        CraftError: One of them is not on this machine, or is not what it was.
    """
    if manifest.inputs == "embedded":
        return []
    opened = []
    for record in manifest.datasets:
        dataset = open_dataset(record.repo_id, _place_of(record, named), policy_config=policy_config)
        if len(dataset) != record.total_frames:
            raise CraftError(_another_dataset(record))
        opened.append(dataset)
    return opened


def _place_of(record: DatasetRecord, named: Sequence[tuple[str, str | None]]) -> Path:
    """The first directory whose metadata have the record's fingerprint."""
    readable = False
    for repo_id, place in _places(record, named):
        with suppress(CraftError):  # nothing there, or nothing that can be read: perhaps the next one
            if fingerprint_in(repo_id, place) == record.fingerprint:
                return place
            readable |= repo_id == record.repo_id
    if readable:
        raise CraftError(_another_dataset(record))
    where = "this machine" if record.root is None else f"{record.root!r:.200}, nor anywhere else on this machine"
    raise CraftError(
        f"the images of this cache are in the dataset {record.repo_id!r:.80}, which is not on {where}: get it with "
        f"`hf download --repo-type dataset {shlex.quote(record.repo_id):.100}`, or build the cache again (with "
        "--inputs=embedded it does not depend on datasets)"
    )


def _places(record: DatasetRecord, named: Sequence[tuple[str, str | None]]) -> Iterator[tuple[str, Path]]:
    for repo_id, root in [*named, (record.repo_id, record.root)]:
        if root is not None:
            yield repo_id, Path(root)
    for repo_id, revision in [*((name, None) for name, _ in named), (record.repo_id, record.revision)]:
        yield from ((repo_id, place) for place in local_copies(repo_id, revision))


def _another_dataset(record: DatasetRecord) -> str:
    return (
        f"the dataset {record.repo_id!r:.80} is not the one that the cache refers to: get the right one with "
        f"`hf download --repo-type dataset {shlex.quote(record.repo_id):.100}`, or build the cache again (with "
        "--inputs=embedded it does not depend on datasets)"
    )


def referenced_images(manifest: Manifest, datasets: Sequence[Any], name: str, dataset: Tensor, frame: Tensor) -> Tensor:
    """Images uint8 [n, *shape] of one name, read from `datasets[dataset]` at `frame`; both int64 [n]."""
    images = torch.empty((len(frame), *manifest.input_features[name].shape), dtype=torch.uint8)
    for index in dataset.unique().tolist():
        rows = (dataset == index).nonzero().squeeze(1)
        (batch,) = read_batches(datasets, [(index, frame[rows].tolist())])
        found = batch.get(name)
        if not isinstance(found, Tensor) or found.shape[1:] != images.shape[1:]:
            raise CraftError(
                f"the dataset {manifest.datasets[index].repo_id!r:.80} has no images {name!r:.80} of the shape "
                f"{tuple(images.shape[1:])}, as the cache says: build it again with `craft cache build`"
            )
        images[rows] = found
    return images


@dataclass(frozen=True)
class MadeStates:
    """What a plan refers to and an anchor's own frame does not hold; `made_states.py` makes it."""

    walked: Tensor | None = None  # states [walks, steps, S]; None: the plan has no walks
    mates: Tensor | None = None  # states [len(plan), S], 0 where an anchor has no mate; None: none has one


NOTHING_MADE = MadeStates()


def as_anchors(
    batch: RawBatch,
    plan: Plan,
    anchors: Sequence[int] | npt.NDArray[np.int64],
    state_stats: Stats | None = None,
    made: MadeStates = NOTHING_MADE,
) -> RawBatch:
    """The batch as the plan wants it, before any preprocessor; the given one stays as it is.

    Frames of old datasets pass unchanged. Cross anchors get their old instruction and their state, and keep nothing but
    observations: actions, rewards and indices describe the new task's demonstration, which the teacher must not see.

    Args:
        batch: Frames `plan.frame[anchors]` of one dataset, as `read_batches` gives them.
        plan: The plan.
        anchors: Rows of the plan.
        state_stats: The teacher's statistics of `observation.state`, for drawn and jittered states.
        made: States that the plan refers to and the frames do not hold.

    Raises:
        CraftError: States are to change and the statistics or the state are missing or do not fit.
    """
    rows = np.asarray(anchors, dtype=np.int64)
    wanted = [plan.instructions[index] for index in plan.instruction[rows]]
    if len(batch["task"]) != len(rows) or len(set(zip(plan.dataset[rows], plan.cross[rows], strict=True))) > 1:
        raise ValueError("a batch holds the frames of the given anchors, all of one dataset and one kind")
    if not plan.cross[rows].any():
        if list(batch["task"]) != wanted:
            raise CraftError(
                "The dataset's instructions are not those that the anchors were planned with: it has changed since."
                " Build the cache again into an empty directory."
            )
        return dict(batch)
    asked = under_old_instructions(batch, plan, rows)
    if plan.drawn[rows].any() or plan.jitter[rows].any() or (plan.walk[rows] >= 0).any():
        asked[STATE] = _changed_states(batch, plan, rows, state_stats, made)
    return asked


def under_old_instructions(batch: RawBatch, plan: Plan, rows: npt.NDArray[np.int64]) -> RawBatch:
    """Observations, and the old instruction that the plan gives to each."""
    observed = {key: value for key, value in batch.items() if key.startswith("observation.")}
    return {**observed, "task": [plan.instructions[index] for index in plan.instruction[rows]]}


def _changed_states(
    batch: RawBatch, plan: Plan, rows: npt.NDArray[np.int64], stats: Stats | None, made: MadeStates
) -> Tensor:
    """States [n, S] or histories [n, T, S]; each row depends on the plan's seed and its anchor only."""
    states: Tensor | None = batch.get(STATE)
    stats = checked_stats(states, stats)
    changed = []
    for place, row in enumerate(rows.tolist()):
        state = states[place : place + 1]  # type: ignore[index]  # checked there
        if plan.walk[row] >= 0:
            if made.walked is None:
                raise ValueError("the plan has walks, and their states are not given")
            changed.append(end_histories_at(state, made.walked[plan.walk[row], plan.walk_step[row]][None]))
        else:
            changed.append(_changed_state(state, plan, row, stats, made.mates))
    return torch.cat(changed)


def checked_stats(states: Tensor | None, stats: Stats | None) -> Stats:
    """The teacher's statistics of the state, if there are any and they fit to the dataset's states."""
    if stats is None or states is None:
        lacking = f"the dataset has no {STATE}" if states is None else f"the teacher has no statistics of {STATE}"
        raise CraftError(f"States cannot be changed: {lacking}. {_LEAVE_STATES}")
    widths = {value.numel() for name, value in stats.items() if name in ("mean", "std", "min", "max", "q01", "q99")}
    if widths - {states.shape[-1]}:
        raise CraftError(
            f"The dataset's {STATE} has {states.shape[-1]} dimensions and the teacher's statistics have"
            f" {max(widths - {states.shape[-1]})}. Use the dataset of the teacher's robot. {_LEAVE_STATES}"
        )
    return stats


def _changed_state(state: Tensor, plan: Plan, anchor: int, stats: Stats, mates: Tensor | None) -> Tensor:
    generator = anchor_generator(plan.seed, anchor)
    if plan.mate[anchor] >= 0:
        if mates is None:
            raise ValueError("the plan has mates, and their states are not given")
        state = move_towards(state, mates[anchor : anchor + 1], generator)
    if plan.drawn[anchor]:
        return end_histories_at(state, draw_states(stats, 1, generator))
    if plan.jitter[anchor]:
        return jitter_states(state, stats, float(plan.jitter[anchor]), generator)
    return state
