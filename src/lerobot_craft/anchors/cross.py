"""States of cross anchors: drawn from the statistics that the teacher ships, or slightly perturbed.

A cross anchor pairs a new-task frame with an old instruction. Drawn and jittered states cover more of the old tasks'
states than new frames do. They are set before any preprocessor, because some policies write the state into the prompt.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.errors import CraftError

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
            " and std, min and max, or q01 and q99 are needed. Set --drawn_states=0."
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
            " std, min and max, or q01 and q99 are needed. Set --state_jitter=0."
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
            f"The teacher's {name} of the state is not finite, so no states can be drawn from it. Set --drawn_states=0"
            " and --state_jitter=0, or mend the teacher's statistics."
        )
    return values
