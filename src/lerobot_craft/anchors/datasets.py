"""From a raw batch of frames to a raw batch of anchors: the instruction and the state that the plan asks for."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.cross import Stats, anchor_generator, draw_states, end_histories_at, jitter_states
from lerobot_craft.anchors.plan import Plan
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch

STATE = "observation.state"


def as_anchors(
    batch: RawBatch, plan: Plan, anchors: Sequence[int] | npt.NDArray[np.int64], state_stats: Stats | None = None
) -> RawBatch:
    """The batch as the plan wants it, before any preprocessor; the given one stays as it is.

    Frames of old datasets pass unchanged. Cross anchors get their old instruction and their state, and keep nothing but
    observations: actions, rewards and indices describe the new task's demonstration, which the teacher must not see.

    Args:
        batch: Frames `plan.frame[anchors]` of one dataset, as `read_batches` gives them.
        plan: The plan.
        anchors: Rows of the plan.
        state_stats: The teacher's statistics of `observation.state`, for drawn and jittered states.

    Raises:
        CraftError: States are to change and the statistics or the state are missing or do not fit.
    """
    rows = np.asarray(anchors, dtype=np.int64)
    wanted = [plan.instructions[index] for index in plan.instruction[rows]]
    if len(batch["task"]) != len(rows) or len(set(plan.dataset[rows].tolist())) > 1:
        raise ValueError("a batch holds the frames of the given anchors, all of one dataset")
    if not plan.cross[rows].any():
        if list(batch["task"]) != wanted:
            raise CraftError(
                "The dataset's instructions are not those that the anchors were planned with: it has changed since."
                " Build the cache again into an empty directory."
            )
        return dict(batch)
    observed = {key: value for key, value in batch.items() if key.startswith("observation.")}
    if plan.drawn[rows].any() or plan.jitter[rows].any():
        observed[STATE] = _changed_states(batch, plan, rows, state_stats)
    return {**observed, "task": wanted}


def _changed_states(batch: RawBatch, plan: Plan, rows: npt.NDArray[np.int64], stats: Stats | None) -> Tensor:
    """States [n, S] or histories [n, T, S]; each row depends on the plan's seed and its anchor only."""
    if stats is None or STATE not in batch:
        lacking = f"the dataset has no {STATE}" if STATE not in batch else f"the teacher has no statistics of {STATE}"
        raise CraftError(f"States cannot be changed: {lacking}. Set --drawn_states=0 and --state_jitter=0.")
    states: Tensor = batch[STATE]
    widths = {value.numel() for name, value in stats.items() if name in ("mean", "std", "min", "max", "q01", "q99")}
    if widths - {states.shape[-1]}:
        raise CraftError(
            f"The dataset's {STATE} has {states.shape[-1]} dimensions and the teacher's statistics have"
            f" {max(widths - {states.shape[-1]})}. Use the dataset of the teacher's robot, or set --drawn_states=0 and"
            " --state_jitter=0."
        )
    return torch.cat([_changed_state(states[i : i + 1], plan, int(row), stats) for i, row in enumerate(rows)])


def _changed_state(state: Tensor, plan: Plan, anchor: int, stats: Stats) -> Tensor:
    generator = anchor_generator(plan.seed, anchor)
    if plan.drawn[anchor]:
        return end_histories_at(state, draw_states(stats, 1, generator))
    if plan.jitter[anchor]:
        return jitter_states(state, stats, float(plan.jitter[anchor]), generator)
    return state
