"""Does a policy still listen? The same frames under every instruction, before and after fine-tuning.

A policy that forgot an instruction does not act at random: under "red basket" it does what it does under "blue basket".
That shows in actions alone, on any frames, without a simulator. With a_i(f) the actions [H, A] that a policy takes in
frame f under instruction i, and s the spread of the actions that the policy before was trained on, by dimension:

    D(i, j) = sqrt(mean over f, h, d of ((a_i - a_j) / s)^2)        how far two instructions are told apart
    gone(i, j) = 1 - D_after(i, j) / D_before(i, j)                 the share of the difference that is gone

Both sides of a difference are drawn with the same noise. `variation` is D between two draws of noise under one
instruction: a pair that is not further apart than that was not told apart before either, and gone is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.anchors.files import write_atomically
from lerobot_craft.anchors.strict_json import StrictJSONError, to_json
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.intervals import CONFIDENCE, FloatArray
from lerobot_craft.evaluation.results import Estimate
from lerobot_craft.evaluation.versioned import read_versioned

SCHEMA = 1
LISTENING_FILE = "listening.json"
MOSTLY_GONE = 0.5  # from here on a sentence names the pair
_RESAMPLES = 1000
_STILL = 1e-3  # of the spread of the dimension that moves most


@dataclass(frozen=True)
class Listening:
    """What was heard before and after.

    Attributes:
        before: Where the policy before was found.
        after: Where the policy after was found.
        dataset: Where the frames are from.
        frames: How many.
        episodes: Of how many episodes: intervals resample these.
        instructions: Rows and columns of all matrices.
        learned: Those of them that the dataset's own frames have.
        told_apart_before: D before, in units of the actions' spread.
        told_apart_after: D after, in the same unit.
        variation: Per instruction, D between two draws of the noise, before.
        moved: Per instruction, D between before and after.
        gone: Per pair, with its interval; None where the pair was not told apart before.
    """

    schema: int
    craft_version: str
    created: str
    command: str
    before: str
    after: str
    dataset: str
    frames: int
    episodes: int
    instructions: list[str]
    learned: list[str]
    told_apart_before: list[list[float]]
    told_apart_after: list[list[float]]
    variation: list[float]
    moved: list[float]
    gone: list[list[Estimate | None]]

    def swallowed_by(self, instruction: str) -> tuple[str, Estimate] | None:
        """What an instruction sounds like now: of the learned ones, or of all where none is, the nearest and how near.

        None for a learned instruction, and where no pair of it was told apart before.
        """
        if instruction in self.learned:
            return None
        row = self.gone[self.instructions.index(instruction)]
        others = [name for name in (self.learned or self.instructions) if name != instruction]
        known = [(other, found) for other in others if (found := row[self.instructions.index(other)]) is not None]
        return max(known, key=lambda pair: pair[1].value, default=None)

    def sentences(self) -> list[str]:
        """One for each instruction that is mostly gone, the worst first; else one that says that none is."""
        found = {name: pair for name in self.instructions if (pair := self.swallowed_by(name)) is not None}
        lost = sorted((pair[1].value, name) for name, pair in found.items() if pair[1].value >= MOSTLY_GONE)
        if lost:
            return [self._sentence(name, *found[name]) for _, name in reversed(lost)]
        if not found:
            return ["The policy did not tell these instructions apart in these frames before, so nothing can be said."]
        name, (other, gone) = max(found.items(), key=lambda item: item[1][1].value)
        return [
            f"Every instruction still does its own thing. The closest pair: {max(gone.value, 0.0):.2f} of the "
            f"difference between {name!r} and {other!r} is gone."
        ]

    @staticmethod
    def _sentence(name: str, other: str, gone: Estimate) -> str:
        interval = "" if gone.low is None else f" [{gone.low:.2f}, {gone.high:.2f}]"
        share = f"{gone.value:.2f}{interval} of the difference is gone"
        return f"After fine-tuning, {name!r} does what {other!r} does: {share}."


def compare(
    before: FloatArray, again: FloatArray, after: FloatArray, episode: npt.NDArray[np.int64], spread: FloatArray
) -> dict[str, Any]:
    """Matrices and intervals.

    Args:
        before: Actions [I, F, H, A] of the policy before.
        again: The same with other noise.
        after: Actions of the policy after.
        episode: Of each frame [F].
        spread: The unit of each dimension [A]; one that hardly moves weighs nothing.
    """
    moves = spread > _STILL * spread.max()
    before, again, after = (actions[..., moves] / spread[moves] for actions in (before, again, after))
    pairs = {name: _squares(actions) for name, actions in (("before", before), ("after", after))}  # [F, I, I]
    d_before, d_after = (np.sqrt(pairs[name].mean(axis=0)) for name in ("before", "after"))
    variation = np.sqrt(((before - again) ** 2).mean(axis=(1, 2, 3)))  # [I]
    moved = np.sqrt(((before - after) ** 2).mean(axis=(1, 2, 3)))
    told_apart = d_before > np.maximum(variation[:, None], variation[None, :])
    low, high = _interval(pairs["before"], pairs["after"], episode)
    size = len(before)
    gone: list[list[Estimate | None]] = [[None] * size for _ in range(size)]
    for i, j in zip(*np.nonzero(told_apart & ~np.eye(size, dtype=bool)), strict=True):
        gone[i][j] = Estimate(
            float(1 - d_after[i, j] / d_before[i, j]),
            None if low is None else float(low[i, j]),
            None if high is None else float(high[i, j]),
        )
    return {
        "frames": before.shape[1],
        "episodes": len(np.unique(episode)),
        "told_apart_before": d_before.tolist(),
        "told_apart_after": d_after.tolist(),
        "variation": variation.tolist(),
        "moved": moved.tolist(),
        "gone": gone,
    }


def _squares(actions: FloatArray) -> FloatArray:
    """Mean squared difference of every two instructions in every frame [F, I, I], of actions [I, F, H, A]."""
    flat = actions.reshape(*actions.shape[:2], -1)  # [I, F, H * A]
    return np.stack([((frame[:, None] - frame[None, :]) ** 2).mean(axis=-1) for frame in flat.swapaxes(0, 1)])


def _interval(
    before: FloatArray, after: FloatArray, episode: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray] | tuple[None, None]:
    """Bounds [I, I] of gone over draws of whole episodes: frames of one episode are alike. None with one episode."""
    episodes, member = np.unique(episode, return_inverse=True)
    if len(episodes) < 2:
        return None, None
    sums = [np.zeros((len(episodes), *pairs.shape[1:])) for pairs in (before, after)]  # [E, I, I]
    for total, pairs in zip(sums, (before, after), strict=True):
        np.add.at(total, member, pairs)
    share = np.full(len(episodes), 1 / len(episodes))
    times = np.random.default_rng(0).multinomial(len(episodes), share, size=_RESAMPLES).astype(np.float64)  # [R, E]
    was, is_now = (np.einsum("re,eij->rij", times, total) for total in sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = 1 - np.sqrt(is_now / was)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return low, high


def write_listening(path: Path, listening: Listening) -> None:
    """Write it so that a reader sees the former file or this one, never a part."""
    write_atomically(path, to_json(listening))


def read_listening(path: Path) -> Listening:
    """Read a `listening.json` strictly."""
    try:
        found = read_versioned(path, Listening, SCHEMA)
        _check(found)
    except StrictJSONError as error:
        raise CraftError(
            f"{path} is no listening file of this release: {error}. Remove it and run `craft listen` again."
        ) from error
    return found


def _check(found: Listening) -> None:
    size = len(found.instructions)
    square: Mapping[str, Sequence[Sequence[Any]]] = {
        name: getattr(found, name) for name in ("told_apart_before", "told_apart_after", "gone")
    }
    for name, matrix in square.items():
        if len(matrix) != size or any(len(row) != size for row in matrix):
            raise StrictJSONError(f"{name}: expected {size} x {size}, one row for each instruction")
    for name in ("variation", "moved"):
        if len(getattr(found, name)) != size:
            raise StrictJSONError(f"{name}: expected {size} numbers, one for each instruction")


def listening_table(found: Listening) -> str:
    """Markdown: per instruction, what is left of it."""
    lines = [
        f"{found.frames} frames of {found.episodes} episodes of {found.dataset}, every frame under every instruction",
        "",
        "| instruction | moved | closest now | gone of the difference |",
        "|---|---|---|---|",
    ]
    for name, moved in zip(found.instructions, found.moved, strict=True):
        pair = found.swallowed_by(name)
        if name in found.learned:
            closest, gone = "(learned)", ""
        elif pair is None:
            closest, gone = "(not told apart before)", ""
        else:
            bounds = "" if pair[1].low is None else f" [{pair[1].low:.2f}, {pair[1].high:.2f}]"
            closest, gone = pair[0], f"{pair[1].value:.2f}{bounds}"
        lines.append(f"| {name} | {moved:.2f} | {closest} | {gone} |")
    return "\n".join([*lines, "", *found.sentences()])
