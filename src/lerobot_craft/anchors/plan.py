"""The plan of a cache: which frame is paired with which instruction, decided before anything is read.

A plan depends only on options, seed and the datasets' metadata, so an interrupted build resumes with the same anchors.

Frames are chosen evenly over tasks, each task's episodes, and each episode's phases. Old skills are lost where no
anchor looks. Uniform sampling would favor long tasks and episodes, and could miss phases.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lerobot_craft.errors import CraftError, setting
from lerobot_craft.lerobot_api.datasets import FrameTable

type Ints = npt.NDArray[np.int64]


def choose_frames(table: FrameTable, n: int, seed: int | list[int]) -> Ints:
    """Choose n rows of the table. Every prefix of the result is also spread over tasks and episodes.

    Tasks get equal numbers of frames (within one), as do the episodes of a task; the share of one that is too short
    goes to the others. The m frames of a task lie in m different strata of relative position.

    Args:
        table: The frames to choose from.
        n: Number of frames; all frames if the table has fewer.
        seed: The same seed gives the same frames.
    """
    rng = np.random.default_rng(seed)
    rows = np.lexsort((table.position, table.episode, table.task))
    sizes = np.unique(table.task, return_counts=True)[1]
    quotas = share_out(n, sizes, rng)
    parts = [
        _choose_in_task(table.episode, own, int(quota), rng)
        for own, quota in zip(np.split(rows, np.cumsum(sizes)), [*quotas, 0], strict=True)
        if quota
    ]
    if not parts:
        return np.empty(0, dtype=np.int64)
    return np.concatenate(parts)[spread(np.repeat(np.arange(len(sizes)), quotas), rng)]


def share_out(n: int, capacities: Ints, rng: np.random.Generator) -> Ints:
    """Split n as equally as the capacities allow; who gets one more is random.

    Parts below their capacity differ by at most one. They sum to n, or to the total capacity if that is less.
    """
    parts = np.zeros(len(capacities), dtype=np.int64)
    left = min(n, int(capacities.sum()))
    while left > 0:
        open_ = np.flatnonzero(parts < capacities)
        if left < len(open_):
            parts[rng.permutation(open_)[:left]] += 1
            break
        step = min(left // len(open_), int((capacities - parts)[open_].min()))
        parts[open_] += step
        left -= step * len(open_)
    return parts


def spread(groups: Ints, rng: np.random.Generator) -> Ints:
    """An order of the items that spreads every group over the whole length, keeping the order within a group.

    Args:
        groups: The group of each item, as small integers from 0.
        rng: Breaks ties.
    """
    sizes = np.bincount(groups)
    by_group = np.argsort(groups, kind="stable")
    rank = np.empty(len(groups), dtype=np.int64)  # of an item within its group
    rank[by_group] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    due = (rank + 0.5) / sizes[groups]
    order: Ints = np.lexsort((rng.random(len(groups)), due))
    return order


def _choose_in_task(episode: Ints, rows: Ints, m: int, rng: np.random.Generator) -> Ints:
    """Rows of m frames of one task, alternating between episodes; an episode's phases come in random order.

    Args:
        episode: Of every frame of the table.
        rows: The task's rows, sorted by episode and position.
        m: Number of frames, at least one.
        rng: Random generator.
    """
    sizes = np.unique(episode[rows], return_counts=True)[1]
    starts = np.cumsum(sizes) - sizes
    quotas = share_out(m, sizes, rng)
    # Slot j of an episode with q slots is at (j + u) / q of the movement. Sorting the slots of all episodes gives
    # strata 0..m-1: each is used once, and each episode's strata are spread over the whole movement.
    episode_of = np.repeat(np.arange(len(sizes)), quotas)  # [m]
    slot = np.arange(m) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    due = (slot + rng.random(len(sizes))[episode_of]) / quotas[episode_of]
    stratum = np.empty(m, dtype=np.int64)
    stratum[np.lexsort((rng.random(m), due))] = np.arange(m)
    phase = (stratum + rng.random(m)) / m  # [m], in [0, 1)

    places = np.floor(phase * sizes[episode_of]).astype(np.int64)
    for slots in np.split(np.arange(m), np.cumsum(quotas)):
        if len(slots):
            places[slots] = rng.permutation(_distinct(places[slots], int(sizes[episode_of[slots[0]]])))
    chosen: Ints = rows[starts[episode_of] + places]
    return chosen[spread(episode_of, rng)]


def _distinct(places: Ints, size: int) -> Ints:
    """Ascending places in [0, size), moved apart as little as possible so that all are distinct."""
    slot = np.arange(len(places))
    later: Ints = np.maximum.accumulate(places - slot) + slot
    apart: Ints = np.minimum(later, size - len(places) + slot)
    return apart


type Source = tuple[FrameTable, Sequence[str]]  # a dataset's frames, and the instructions that its tasks index

# Random streams under the plan's seed. numpy treats [seed, 1] and [seed, 1, 0] as the same stream.
_OLD, _NEW, ROWS, _WALKS, _NEAR = 1, 2, 3, 4, 5
# Noise on states between two old frames, in standard deviations: turns a line into a tube.
BETWEEN_JITTER = 0.05

ANCHOR = np.dtype(
    [
        ("dataset", np.int64),
        ("frame", np.int64),
        ("instruction", np.int64),
        ("cross", np.bool_),
        ("drawn", np.bool_),
        ("jitter", np.float64),
        ("walk", np.int64),
        ("walk_step", np.int64),
        ("mate", np.int64),
    ]
)


def dataset_anchors(
    old: Sequence[Source], keep: tuple[str, ...], n: int, seed: int, first: int = 0
) -> npt.NDArray[np.void]:
    """Old frames under their own instructions; the first `first` datasets give all frames if there is room."""
    table, dataset, frame = _join(old, keep)
    rows: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    for of_first in (True, False):
        wanted = np.flatnonzero((table.task >= 0) & ((dataset < first) == of_first))
        chosen = choose_frames(table.take(wanted), n - len(rows), [seed, _OLD])
        rows = np.concatenate([rows, wanted[chosen]])
    anchors = _blank(len(rows))
    anchors["dataset"], anchors["frame"], anchors["instruction"] = dataset[rows], frame[rows], table.task[rows]
    return anchors


class Walking(NamedTuple):
    """Share of the cross anchors that lie on the teacher's walks, and anchors per walk."""

    share: float
    length: int

    def walks(self, anchors: int) -> int:
        """Number of walks among `anchors`; at least one if any are wanted and one fits."""
        wanted = round(self.share * anchors / self.length)
        return min(max(wanted, 1), anchors // self.length) if self.share else 0


def cross_anchors(
    new: Sequence[Source],
    first: int,
    instructions: int,
    n: int,
    drawn: float,
    jitter: float,
    walking: Walking,
    seed: int,
    near: npt.NDArray[np.void] | None = None,
) -> npt.NDArray[np.void]:
    """Frames chosen evenly for each instruction, so that each sees all tasks, episodes and phases.

    `near` holds old frames as anchors. Instructions that have some use them instead of the teacher's statistics.
    """
    table, dataset, frame = _join(new, present(new))
    # Walks reuse the same few first frames, so only the other anchors are limited by the number of frames.
    still = 1 - walking.share
    capacity = np.full(instructions, int(len(table) / still) if still else n)
    quotas = share_out(n, capacity, np.random.default_rng([seed, _NEW]))
    parts, walks = [], 0
    for instruction, quota in enumerate(quotas):
        walked = _walks(table, walking.walks(int(quota)), walking.length, walks, drawn, [seed, _WALKS, instruction + 1])
        rows = choose_frames(table, int(quota) - len(walked), [seed, _NEW, instruction + 1])
        stood = _blank(len(rows))
        stood["frame"] = rows
        order = np.random.default_rng([seed, ROWS, instruction + 1]).permutation(len(rows))
        stood["drawn"][order[: round(drawn * len(rows))]] = True
        stood["jitter"] = np.where(stood["drawn"], 0.0, jitter)
        anchors = np.concatenate([stood, walked])
        rows = anchors["frame"]
        anchors["dataset"], anchors["frame"], anchors["cross"] = first + dataset[rows], frame[rows], True
        anchors["instruction"] = instruction
        if near is not None and len(mine := near[near["instruction"] == instruction]):
            _go_near(anchors, mine, np.random.default_rng([seed, _NEAR, instruction + 1]))
        parts.append(anchors)
        walks += len(walked) // walking.length
    return np.concatenate(parts)


def _go_near(anchors: npt.NDArray[np.void], old: npt.NDArray[np.void], rng: np.random.Generator) -> None:
    """In place: put drawn anchors between two old frames of one dataset, or on a walk from an old frame."""
    drawn = anchors["drawn"].copy()
    walked = anchors["walk"] >= 0
    _, number = np.unique(anchors["walk"][drawn & walked], return_inverse=True)
    chosen = np.empty(len(anchors), dtype=np.int64)
    # A random round-robin: all old frames are used equally often.
    turn = rng.permutation(len(old))
    chosen[drawn & walked] = turn[number % len(old)]
    chosen[drawn & ~walked] = turn[np.arange((drawn & ~walked).sum()) % len(old)]
    for name in ("dataset", "frame"):
        anchors[name][drawn] = old[name][chosen[drawn]]
    anchors["drawn"] = False
    between = np.flatnonzero(drawn & ~walked)
    anchors["jitter"][between] = BETWEEN_JITTER
    for dataset in np.unique(anchors["dataset"][between]):
        rows = between[anchors["dataset"][between] == dataset]
        anchors["mate"][rows] = rng.choice(old["frame"][old["dataset"] == dataset], size=len(rows))


def _walks(table: FrameTable, n: int, length: int, first: int, drawn: float, seed: list[int]) -> npt.NDArray[np.void]:
    """Walks from first frames of episodes, numbered from `first`. A walk's anchors are all drawn or all not."""
    rng = np.random.default_rng(seed)
    begins = np.flatnonzero(table.position == 0)
    anchors = _blank(n * length)
    anchors["frame"] = np.repeat(begins[rng.integers(len(begins), size=n)], length)
    anchors["drawn"] = np.repeat(rng.permutation(n) < round(drawn * n), length)
    anchors["walk"] = first + np.repeat(np.arange(n), length)
    anchors["walk_step"] = np.tile(np.arange(length), n)
    return anchors


def _blank(n: int) -> npt.NDArray[np.void]:
    anchors = np.zeros(n, dtype=ANCHOR)
    anchors["walk"] = anchors["mate"] = -1
    return anchors


def present(sources: Sequence[Source]) -> tuple[str, ...]:
    """Instructions that have a frame, without duplicates, in dataset order."""
    return tuple(dict.fromkeys(names[task] for table, names in sources for task in np.unique(table.task)))


def _join(
    sources: Sequence[Source], instructions: tuple[str, ...]
) -> tuple[FrameTable, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All datasets as one table with tasks numbered by instruction (-1: not listed), and each row's origin."""
    number = {instruction: index for index, instruction in enumerate(instructions)}
    tasks, episodes, first_episode = [], [], 0
    for table, names in sources:
        tasks.append(np.asarray([number.get(name, -1) for name in names], dtype=np.int64)[table.task])
        episodes.append(table.episode + first_episode)
        first_episode += int(table.episode.max(initial=-1)) + 1
    lengths = [len(table) for table, _ in sources]
    joined = FrameTable(
        task=np.concatenate(tasks),
        episode=np.concatenate(episodes),
        position=np.concatenate([table.position for table, _ in sources]),
        length=np.concatenate([table.length for table, _ in sources]),
    )
    frame = np.concatenate([np.arange(length) for length in lengths])
    return joined, np.repeat(np.arange(len(lengths)), lengths), frame


type AnchorSource = Literal["dataset", "cross", "both"]


@dataclass(frozen=True, eq=False)
class Plan:
    """An ordered list of anchors as columns: anchor i is row i of each. Any prefix is spread over instructions."""

    source: AnchorSource
    seed: int
    requested: int  # anchors asked for; there are fewer if the datasets have fewer frames
    instructions: tuple[str, ...]  # the old ones
    first_new: int  # datasets from this number on belong to the new task
    dataset: npt.NDArray[np.int64]  # index of the dataset: old ones first, then new ones
    frame: npt.NDArray[np.int64]  # row of that dataset's FrameTable
    instruction: npt.NDArray[np.int64]  # index into `instructions`
    cross: npt.NDArray[np.bool_]  # True unless the anchor is an unchanged frame of an old dataset
    drawn: npt.NDArray[np.bool_]  # the state is drawn from the teacher's statistics
    jitter: npt.NDArray[np.float64]  # in standard deviations; 0 leaves the state as it is
    walk: npt.NDArray[np.int64]  # index of the teacher's walk that the state lies on; -1: none
    walk_step: npt.NDArray[np.int64]  # position on the walk; 0 is the start
    mate: npt.NDArray[np.int64]  # frame of the same dataset toward which the state is moved; -1: none

    def __len__(self) -> int:
        return len(self.frame)

    def counts(self) -> list[int]:
        """Anchors of each instruction."""
        return [int(count) for count in np.bincount(self.instruction, minlength=len(self.instructions))]

    def digest(self) -> str:
        """SHA-256 of the whole plan; equal plans have equal digests on every machine."""
        head = [self.source, self.seed, self.requested, self.instructions]
        digest = hashlib.sha256(json.dumps(head).encode())
        for column in (self.dataset, self.frame, self.instruction, self.cross, self.drawn):
            digest.update(column.astype("<i8").tobytes())
        digest.update(self.jitter.astype("<f8").tobytes())
        if self.num_walks:  # plans without walks keep the digest of older versions
            digest.update(np.stack([self.walk, self.walk_step]).astype("<i8").tobytes())
        if self.has_mates:
            digest.update(self.mate.astype("<i8").tobytes())
        return digest.hexdigest()

    @property
    def has_mates(self) -> bool:
        """Whether some states lie between two old frames."""
        return bool((self.mate >= 0).any())

    @property
    def num_walks(self) -> int:
        """Number of the teacher's walks."""
        return int(self.walk.max(initial=-1)) + 1

    @property
    def walk_steps(self) -> int:
        """Anchors per walk."""
        return int(self.walk_step.max(initial=0)) + 1

    def alike(self, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Split `rows` into groups (positions in `rows`) that can share a batch: one dataset, all cross or none."""
        kinds = self.dataset[rows] * 2 + self.cross[rows]
        for kind in np.unique(kinds):
            yield np.flatnonzero(kinds == kind)

    def walk_starts(self) -> npt.NDArray[np.int64]:
        """The first anchor of each walk."""
        first = np.flatnonzero((self.walk >= 0) & (self.walk_step == 0))
        return first[np.argsort(self.walk[first])]


def make_plan(
    source: AnchorSource,
    num_samples: int,
    seed: int,
    old: Sequence[Source] = (),
    new: Sequence[Source] = (),
    old_instructions: Sequence[str] | None = None,
    drawn_states: float = 0.0,
    state_jitter: float = 0.0,
    old_frames: int | None = None,
    walked_states: float = 0.0,
    walk_length: int = 1,
    draw_from_old: bool = False,
    first: int = 0,
) -> Plan:
    """Plan the anchors of a cache, evenly over the old instructions.

    Args:
        source: `dataset`: frames of the old datasets under their own instructions. `cross`: frames of the new datasets;
            each old instruction gets the same spread of them. `both`: half and half, or `old_frames` of the first.
        num_samples: Total number of anchors.
        seed: Seed of every choice.
        old: Datasets of the tasks to keep.
        new: Datasets of the task to learn.
        old_instructions: What to keep; None: all instructions of the old datasets.
        drawn_states: Share of the cross anchors whose state is drawn from the teacher's statistics.
        state_jitter: Noise on the states of the other cross anchors, in standard deviations.
        old_frames: For `both`: number of anchors that are old frames; None: half.
        walked_states: Share of the cross anchors that lie on the teacher's walks, at least one walk per instruction.
        walk_length: Anchors per walk.
        draw_from_old: For `both`: instead of drawing states from the statistics, place them between two old frames or
            on a walk from one.
        first: Number of old datasets whose frames are all used before others give any: a memory, which is small.

    Raises:
        CraftError: The options contradict each other or the datasets.
    """
    _check_options(source, num_samples, seed, drawn_states, state_jitter, walked_states)
    _check_old_frames(source, num_samples, old_frames)
    keep = _old_instructions(source, old, old_instructions)
    cross_of_both = num_samples // 2 if old_frames is None else num_samples - old_frames
    from_new = {"dataset": 0, "cross": num_samples, "both": cross_of_both}[source]
    parts, near = [], None
    if source != "cross":
        parts.append(dataset_anchors(old, keep, num_samples - from_new, seed, first))
        near = parts[0] if draw_from_old else None
    if source != "dataset":
        _refuse_the_new_task(keep, new)
        walking = Walking(walked_states, walk_length)
        parts.append(cross_anchors(new, len(old), len(keep), from_new, drawn_states, state_jitter, walking, seed, near))
    anchors = np.concatenate(parts)
    # One group per instruction and origin, so that any prefix of the plan is a smaller plan of the same kind.
    groups = np.unique(anchors["instruction"] * 2 + anchors["cross"], return_inverse=True)[1]
    anchors = anchors[spread(groups, np.random.default_rng([seed, ROWS]))]
    plan = Plan(
        source, seed, num_samples, keep, len(old), **{name: anchors[name].copy() for name in ANCHOR.fields or ()}
    )
    _check_counts(plan)
    return plan


def parse_old_instructions(text: str) -> list[str]:
    """Instructions from a file, one per line, if `text` is a path; else from the text, split at lines or `;`."""
    try:
        file = Path(text) if Path(text).is_file() else None
    except (OSError, ValueError):  # too long to be a path
        file = None
    try:
        content = text if file is None else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CraftError(
            f"{setting('old_instructions')}={text} cannot be read as text ({error}). Give a UTF-8 file."
        ) from error
    parts = content.split(";") if file is None and "\n" not in text else content.splitlines()
    instructions = list(dict.fromkeys(part.strip() for part in parts if part.strip()))
    if not instructions:
        raise CraftError(
            f"{setting('old_instructions')}={text!r} holds no instruction. Give a file with one per line, or them "
            "with ; between."
        )
    return instructions


def _old_instructions(source: AnchorSource, old: Sequence[Source], given: Sequence[str] | None) -> tuple[str, ...]:
    in_datasets = present(old)
    if source != "cross" and not in_datasets:
        raise CraftError(
            f"{setting('anchor_source')}={source} needs frames of an old dataset and there is none. Give"
            f" {setting('old_dataset.repo_id')} and {setting('old_dataset.root')} of the old tasks, or use"
            f" {setting('anchor_source')}=cross with {setting('old_instructions')}."
        )
    keep = in_datasets if given is None else tuple(dict.fromkeys(given))
    if not keep:
        raise CraftError(
            "Cross anchors need the instructions of the old tasks. Give them as"
            f" {setting('old_instructions')}, with ; between them"
            " or as a file with one per line."
        )
    unknown = [instruction for instruction in keep if instruction not in in_datasets]
    if source == "dataset" and unknown:
        raise CraftError(
            f"No old dataset has frames of the instruction {unknown[0]!r}. They have: {'; '.join(in_datasets)}."
            f" Mend {setting('old_instructions')}, or use {setting('anchor_source')}=both, which covers it by frames of"
            " the new task."
        )
    return keep


def plain(instruction: str) -> str:
    """An instruction normalized for comparison: lower case, single spaces, no final punctuation."""
    return " ".join(instruction.casefold().split()).rstrip(".! ")


def _refuse_the_new_task(keep: tuple[str, ...], new: Sequence[Source]) -> None:
    """Refuse a new task among the old instructions: its cross anchors would work against the task loss."""
    learned = present(new)
    if not learned:
        raise CraftError(
            "Cross anchors need frames of the new task and there are none. Give the dataset that you will fine-tune on."
        )
    known = {plain(instruction): instruction for instruction in learned}
    for instruction in keep:
        if plain(instruction) in known:
            raise CraftError(
                f"The old instruction {instruction!r} is also the new task's, {known[plain(instruction)]!r}: a cross"
                " anchor would pin the new task to the teacher. Remove it from"
                f" {setting('old_instructions')}; if you gave none,"
                " list the old instructions there without it."
            )


def _check_options(
    source: str, num_samples: int, seed: int, drawn_states: float, state_jitter: float, walked_states: float
) -> None:
    if source not in get_args(AnchorSource.__value__):
        raise CraftError(f"{setting('anchor_source')}={source} is not known. Use dataset, cross or both.")
    if num_samples < 1:
        raise CraftError(
            f"{setting('num_anchors')}={num_samples} gives no anchors. Ask for at least one per old instruction."
        )
    if seed < 0:
        raise CraftError(f"{setting('seed')}={seed} is negative. Give 0 or more.")
    for flag, share in (("drawn_states", drawn_states), ("walked_states", walked_states)):
        if not 0.0 <= share <= 1.0:
            raise CraftError(f"{setting(flag)}={share} is a share: give a number from 0 to 1.")
    if not 0.0 <= state_jitter < np.inf:
        raise CraftError(f"{setting('state_jitter')}={state_jitter} counts standard deviations: give 0 or more.")


def _check_old_frames(source: str, num_samples: int, old_frames: int | None) -> None:
    if old_frames is None:
        return
    if source != "both":
        number = f"how many anchors there are is {setting('num_anchors')}"
        meant = number if source == "dataset" else "cross anchors need none"
        raise CraftError(f"{setting('old_frames')} is for {setting('anchor_source')}=both: with {source}, {meant}.")
    if not 1 <= old_frames < num_samples:
        raise CraftError(
            f"{setting('old_frames')}={old_frames} of {setting('num_anchors')}={num_samples} anchors: give at least 1,"
            " and less than there are anchors in all, so that some are cross anchors"
            f" ({setting('anchor_source')}=dataset has none, cross only those)."
        )


def _check_counts(plan: Plan) -> None:
    """Refuse a plan that leaves an old task without anchors: it would be lost silently."""
    bare = [instruction for instruction, count in zip(plan.instructions, plan.counts(), strict=True) if count == 0]
    if bare:
        needed = len(plan.instructions) * (2 if plan.source == "both" else 1)
        raise CraftError(
            f"{setting('num_anchors')}={plan.requested} leaves {len(bare)} of {len(plan.instructions)} old instructions"
            f" without an anchor, among them {bare[0]!r}. Give {setting('num_anchors')}={needed} or more."
        )
