"""From dataset frames to anchors: open the datasets of a cache, and set each anchor's instruction and state.

A cross anchor pairs a new-task frame with an old instruction. Drawn and jittered states cover more of the old tasks'
states than new frames do. They are set before any preprocessor, because some policies write the state into the prompt.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.manifest import DatasetRecord, Manifest
from lerobot_craft.anchors.plan import Plan
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.lerobot_api.datasets import RawBatch, fingerprint_in, local_copies, open_dataset
from lerobot_craft.lerobot_api.reading import read_batches

type Stats = Mapping[str, Tensor]  # some of mean, std, min, max, q01, q99, each [S]


def anchor_generator(seed: int, anchor: int) -> torch.Generator:
    """Random generator of one anchor, independent of its batch."""
    mixed = np.random.SeedSequence([seed, anchor]).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(mixed >> np.uint64(1)))


def draw_states(stats: Stats, n: int, generator: torch.Generator) -> Tensor:
    """Draw states [n, S]: normal(mean, std) clipped to known bounds, or uniform within bounds if std is unknown.

    Bounds are [min, max], else [q01, q99]. Constant dimensions stay constant.

    Raises:
        CraftError: The statistics have neither mean and std nor a pair of bounds, or are not finite.
    """
    bounds = _bounds(stats)
    if "mean" in stats and "std" in stats:
        mean, std = _vector(stats, "mean"), _vector(stats, "std")
        states = mean + std * torch.randn(n, len(mean), generator=generator)
        return states if bounds is None else states.clamp(*bounds)
    if bounds is None:
        raise CraftError(
            f"States cannot be drawn: the teacher's statistics of the state hold {sorted(stats) or 'nothing'}, but mean"
            f" and std, min and max, or q01 and q99 are needed. Set {setting('drawn_states')}=0."
        )
    low, high = bounds
    return low + (high - low) * torch.rand(n, len(low), generator=generator)


def jitter_states(states: Tensor, stats: Stats, amount: float, generator: torch.Generator) -> Tensor:
    """States [n, S] plus amount * std * normal; a history [n, T, S] is shifted as a whole."""
    noise = torch.randn(len(states), states.shape[-1], generator=generator)
    return _move(states, amount * spread_of(stats) * noise)


def move_towards(states: Tensor, others: Tensor, generator: torch.Generator) -> Tensor:
    """Move states [n, S] a random fraction of the way to `others` [n, S]; a history is shifted as a whole."""
    last = states if states.ndim == 2 else states[:, -1]
    share = torch.rand(len(states), 1, generator=generator)
    return _move(states, share * (others - last))


def end_histories_at(states: Tensor, last: Tensor) -> Tensor:
    """Replace states [n, S] by `last` [n, S]; a history [n, T, S] is shifted to end there."""
    return last.to(states.dtype) if states.ndim == 2 else _move(states, last - states[:, -1])


def _move(states: Tensor, offset: Tensor) -> Tensor:
    return states + (offset if states.ndim == 2 else offset[:, None]).to(states.dtype)


def spread_of(stats: Stats) -> Tensor:
    """Standard deviation [S]; without it, that of a uniform distribution within the bounds."""
    if "std" in stats:
        return _vector(stats, "std")
    bounds = _bounds(stats)
    if bounds is None:
        raise CraftError(
            f"States cannot be jittered: the teacher's statistics of the state hold {sorted(stats) or 'nothing'}, but"
            f" std, min and max, or q01 and q99 are needed. Set {setting('state_jitter')}=0."
        )
    return (bounds[1] - bounds[0]) / 12**0.5


def limits_of(stats: Stats) -> tuple[Tensor, Tensor]:
    """Bounds [S] of the teacher's data: the known ones, or mean +- 4 standard deviations."""
    if (bounds := _bounds(stats)) is not None:
        return bounds
    mean, spread = _vector(stats, "mean"), spread_of(stats)
    return mean - 4 * spread, mean + 4 * spread


def _bounds(stats: Stats) -> tuple[Tensor, Tensor] | None:
    for low, high in (("min", "max"), ("q01", "q99")):
        if low in stats and high in stats:
            return _vector(stats, low), _vector(stats, high)
    return None


def _vector(stats: Stats, name: str) -> Tensor:
    values = torch.as_tensor(stats[name], dtype=torch.float32).flatten().cpu()
    if not values.isfinite().all():
        raise CraftError(
            f"The teacher's {name} of the state is not finite, so no states can be drawn from it. Set "
            f"{setting('drawn_states')}=0 and {setting('state_jitter')}=0, or mend the teacher's statistics."
        )
    return values


STATE = "observation.state"
_LEAVE_STATES = (
    f"To leave states as they are, set {setting('drawn_states')}=0, {setting('walked_states')}=0 and "
    f"{setting('state_jitter')}=0."
)


def open_referenced(
    manifest: Manifest, policy_config: Any = None, named: Sequence[tuple[str, str | None]] = ()
) -> list[Any]:
    """Open the datasets that hold a cache's images, in manifest order; empty if the cache holds them itself.

    The manifest is not trusted: nothing is downloaded, and only metadata is read until the fingerprint matches.

    Args:
        manifest: The cache's manifest.
        policy_config: Determines which past frames belong to an observation.
        named: Datasets given by the user (repo_id, directory), tried before those in the manifest.

    Raises:
        CraftError: A dataset is not on this machine, or has changed.
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
    """The first directory whose metadata has the record's fingerprint."""
    readable = False
    for repo_id, place in _places(record, named):
        with suppress(CraftError):  # missing or unreadable: try the next one
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
    """Images uint8 [n, *shape] of one feature, read from `datasets[dataset]` at `frame`; both int64 [n]."""
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
    """States that a plan needs and its frames do not contain; made by `walks.make_states`."""

    walked: Tensor | None = None  # states [walks, steps, S]; None: no walks
    mates: Tensor | None = None  # states [len(plan), S], 0 for anchors without a mate; None: no mates


NOTHING_MADE = MadeStates()


def as_anchors(
    batch: RawBatch,
    plan: Plan,
    anchors: Sequence[int] | npt.NDArray[np.int64],
    state_stats: Stats | None = None,
    made: MadeStates = NOTHING_MADE,
) -> RawBatch:
    """Turn a batch of frames into the plan's anchors, before any preprocessor. The input is not modified.

    Old frames are returned unchanged. Cross anchors get their old instruction and state and keep only observations:
    actions, rewards and indices describe the new task's demonstration, which the teacher must not see.

    Args:
        batch: Frames `plan.frame[anchors]` of one dataset, as `read_batches` gives them.
        plan: The plan.
        anchors: Rows of the plan.
        state_stats: The teacher's statistics of `observation.state`, for drawn and jittered states.
        made: States that the plan needs and the frames do not contain.

    Raises:
        CraftError: States must change, but statistics or states are missing or do not match.
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
    """Keep only observations, and set each row's old instruction."""
    observed = {key: value for key, value in batch.items() if key.startswith("observation.")}
    return {**observed, "task": [plan.instructions[index] for index in plan.instruction[rows]]}


def _changed_states(
    batch: RawBatch, plan: Plan, rows: npt.NDArray[np.int64], stats: Stats | None, made: MadeStates
) -> Tensor:
    """States [n, S] or histories [n, T, S]; each row depends only on the plan's seed and its anchor."""
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
    """The teacher's state statistics; refused if missing or not matching the dataset's states."""
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
