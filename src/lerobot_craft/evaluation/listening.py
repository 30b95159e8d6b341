"""Does a policy still listen? The same frames under every instruction, before and after fine-tuning.

A policy that forgot an instruction does not act at random: under "red basket" it does what it does under "blue basket".
That shows in actions alone, on any frames, without a simulator. With a_i(f) the actions [H, A] that a policy takes in
frame f under instruction i, and s the spread of the actions that the policy before was trained on, by dimension:

    D(a, b) = sqrt(mean over f, h, d of ((a - b) / s)^2)            how far two movements are apart
    kept(i, j) = D(before_i, before_j), of a learned j D(before_i, after_j)     how far they would be had i been kept
    now(i, j) = D(after_i, after_j)                                             how far they are
    gone(i, j) = 1 - now(i, j) / kept(i, j)                                     the share of the difference that is gone

What the policy did under an instruction before it learned it has no meaning, hence the second form. Both sides of a
difference are drawn with the same noise. `variation` is D between two draws of noise under one
instruction: movements that are not further apart than that cannot be told apart, and gone is not known.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.intervals import CONFIDENCE, FloatArray
from lerobot_craft.evaluation.results import Estimate, read_versioned
from lerobot_craft.io.files import write_atomically
from lerobot_craft.io.strict_json import StrictJSONError, to_json

SCHEMA = 1
LISTENING_FILE = "listening.json"
MOSTLY_GONE = 0.5  # a sentence names pairs from this share on
_RESAMPLES = 1000
_STILL = 1e-3  # of the spread of the dimension that moves most


@dataclass(frozen=True)
class Listening:
    """How far instructions are told apart, before and after fine-tuning.

    Attributes:
        before: Path of the policy before fine-tuning.
        after: Path of the policy after it.
        dataset: Source of the frames.
        frames: Number of frames.
        episodes: Number of their episodes, which the intervals resample.
        instructions: Rows and columns of all matrices.
        learned: The instructions of the dataset's own frames.
        apart_if_kept: How far instruction i (row) would be from j (column) had it been kept, in units of the spread.
        apart_now: How far they are, in the same unit.
        variation: Per instruction, D between two draws of the noise, before.
        moved: Per instruction, D between before and after.
        gone: Per pair, with its interval; None if the pair cannot be told apart.
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
    apart_if_kept: list[list[float]]
    apart_now: list[list[float]]
    variation: list[float]
    moved: list[float]
    gone: list[list[Estimate | None]]

    def swallowed_by(self, instruction: str) -> tuple[str, Estimate] | None:
        """The instruction whose movement this one has come closest to, and the share of the difference that is gone.

        Only learned instructions count, or all if none was learned. None for a learned instruction, and for one that
        could not be told apart from any of them before.
        """
        if instruction in self.learned:
            return None
        row = self.gone[self.instructions.index(instruction)]
        others = [name for name in (self.learned or self.instructions) if name != instruction]
        known = [(other, found) for other in others if (found := row[self.instructions.index(other)]) is not None]
        return max(known, key=lambda pair: pair[1].value, default=None)

    def sentences(self) -> list[str]:
        """One sentence for each instruction that is mostly gone, the worst first; else one that says that none is."""
        found = {name: pair for name in self.instructions if (pair := self.swallowed_by(name)) is not None}
        lost = sorted((pair[1].value, name) for name, pair in found.items() if pair[1].value >= MOSTLY_GONE)
        if lost:
            return [self._sentence(name, *found[name]) for _, name in reversed(lost)]
        if not found:
            return ["The policy does not tell these instructions apart in these frames, so nothing can be said."]
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
    before: FloatArray,
    again: FloatArray,
    after: FloatArray,
    episode: npt.NDArray[np.int64],
    spread: FloatArray,
    learned: Sequence[bool],
) -> dict[str, Any]:
    """The measured fields of `Listening`.

    Args:
        before: Actions [I, F, H, A] of the policy before.
        again: The same with other noise.
        after: Actions of the policy after.
        episode: Episode of each frame [F].
        spread: Unit of each dimension [A]; a dimension that hardly moves has no weight.
        learned: Whether fine-tuning was to change each instruction [I].
    """
    before, again, after = (_in_units(actions, spread) for actions in (before, again, after))
    target = np.where(np.asarray(learned)[:, None, None, None], after, before)
    kept, now = _squares(before, target), _squares(after, after)  # [F, I, I]
    d_kept, d_now = np.sqrt(kept.mean(axis=0)), np.sqrt(now.mean(axis=0))
    variation = np.sqrt(((before - again) ** 2).mean(axis=(1, 2, 3)))  # [I]
    moved = np.sqrt(((before - after) ** 2).mean(axis=(1, 2, 3)))
    told_apart = d_kept > np.maximum(variation[:, None], variation[None, :])
    low, high = _interval(kept, now, episode)
    size = len(before)
    gone: list[list[Estimate | None]] = [[None] * size for _ in range(size)]
    for i, j in zip(*np.nonzero(told_apart & ~np.eye(size, dtype=bool)), strict=True):
        gone[i][j] = Estimate(
            float(1 - d_now[i, j] / d_kept[i, j]),
            None if low is None else float(low[i, j]),
            None if high is None else float(high[i, j]),
        )
    return {
        "frames": before.shape[1],
        "episodes": len(np.unique(episode)),
        "apart_if_kept": d_kept.tolist(),
        "apart_now": d_now.tolist(),
        "variation": variation.tolist(),
        "moved": moved.tolist(),
        "gone": gone,
    }


def apart(actions: FloatArray, again: FloatArray, spread: FloatArray) -> tuple[FloatArray, FloatArray]:
    """How far apart one policy's instructions are [I, I], and each from itself under other noise [I].

    Args:
        actions: What it does [I, F, H, A].
        again: The same with other noise.
        spread: The unit of each dimension [A].
    """
    actions, again = (_in_units(drawn, spread) for drawn in (actions, again))
    variation: FloatArray = np.sqrt(((actions - again) ** 2).mean(axis=(1, 2, 3)))
    distance: FloatArray = np.sqrt(_squares(actions, actions).mean(axis=0))
    return distance, variation


def _in_units(actions: FloatArray, spread: FloatArray) -> FloatArray:
    """Actions [..., A] in units of the spread, without dimensions that hardly move."""
    moves = spread > _STILL * spread.max()
    scaled: FloatArray = actions[..., moves] / spread[moves]
    return scaled


def _squares(first: FloatArray, second: FloatArray) -> FloatArray:
    """Mean squared difference [F, I, I] between first under i and second under j in every frame; both [I, F, H, A]."""
    one, other = (actions.reshape(*actions.shape[:2], -1).swapaxes(0, 1) for actions in (first, second))  # [F, I, H A]
    return np.stack([((a[:, None] - b[None, :]) ** 2).mean(axis=-1) for a, b in zip(one, other, strict=True)])


def _interval(
    kept: FloatArray, now: FloatArray, episode: npt.NDArray[np.int64]
) -> tuple[FloatArray, FloatArray] | tuple[None, None]:
    """Bounds [I, I] of gone over draws of whole episodes: frames of one episode are alike. None with one episode."""
    episodes, member = np.unique(episode, return_inverse=True)
    if len(episodes) < 2:
        return None, None
    sums = [np.zeros((len(episodes), *pairs.shape[1:])) for pairs in (kept, now)]  # [E, I, I]
    for total, pairs in zip(sums, (kept, now), strict=True):
        np.add.at(total, member, pairs)
    share = np.full(len(episodes), 1 / len(episodes))
    times = np.random.default_rng(0).multinomial(len(episodes), share, size=_RESAMPLES).astype(np.float64)  # [R, E]
    was, is_now = (np.einsum("re,eij->rij", times, total) for total in sums)
    # A pair that was never apart has no share; it is left out anyway.
    drawn = 1 - np.sqrt(np.divide(is_now, was, out=np.ones_like(was), where=was > 0))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return low, high


def write_listening(path: Path, listening: Listening) -> None:
    """Write the file atomically: a reader sees the former one or this one."""
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
        name: getattr(found, name) for name in ("apart_if_kept", "apart_now", "gone")
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
            closest, gone = "(not told apart)", ""
        else:
            bounds = "" if pair[1].low is None else f" [{pair[1].low:.2f}, {pair[1].high:.2f}]"
            closest, gone = pair[0], f"{pair[1].value:.2f}{bounds}"
        lines.append(f"| {name} | {moved:.2f} | {closest} | {gone} |")
    return "\n".join([*lines, "", *found.sentences()])
