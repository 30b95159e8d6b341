"""States of cross anchors that the teacher itself would reach: walks under old instructions, without a simulator.

A new frame under an old instruction asks the teacher where the new task happens to be. Where the old task would lead
from there, no new frame has been: turn the other way round a faucet and the hand is on its other side. So the teacher
walks: from the first frame of a new episode it acts under the old instruction, a motion model (`motion.py`) moves the
robot's own state, the rest of the state stays, and each state on the way becomes an anchor. What is not the robot's own
may be drawn from the teacher's statistics at the start, to walk among objects that the new data do not show; or the
walk begins at an old frame, where there are some (`rows.py`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lerobot_craft.anchors.cross import Stats, anchor_generator, draw_states, limits_of, spread_of
from lerobot_craft.anchors.motion import Motion

# (states [walks, S], step of the walk) -> the teacher's next actions [walks, h, A] as the robot executes them
Act = Callable[[Tensor, int], Tensor]

JITTER = 0.1  # of a standard deviation and a step, on what moves: a walk becomes a tube
_STREAM = 2**40  # keeps the walks' random numbers apart from those of the anchors


def walk(
    starts: Tensor, drawn: Sequence[bool], steps: int, act: Act, motion: Motion, stats: Stats, seed: int
) -> Tensor:
    """The states of every walk, [walks, steps, S], the start included.

    Args:
        starts: States [walks, S] of first frames.
        drawn: Of each walk, whether what is not the robot's own is drawn from the statistics.
        steps: Chunks per walk.
        act: Asks the teacher.
        motion: Moves the robot's own state.
        stats: The teacher's statistics of the state.
        seed: Of draws and jitter.
    """
    generators = [anchor_generator(seed, _STREAM + number) for number in range(len(starts))]
    objects = torch.cat([draw_states(stats, 1, generator) for generator in generators]).to(starts.dtype)
    moved = torch.tensor(list(drawn))[:, None] & ~motion.driven
    state = torch.where(moved, objects, starts)
    low, high = limits_of(stats)
    spread = JITTER * spread_of(stats) * motion.driven
    walked = [state]
    for step in range(1, steps):
        state = motion.after(state, act(state, step - 1))
        noise = torch.cat([torch.randn(1, state.shape[1], generator=generator) for generator in generators])
        # Beyond what the teacher has seen its own walk leads nowhere; objects stay where they were put.
        state = torch.where(motion.driven, (state + spread * noise).clamp(low, high), state)
        walked.append(state)
    return torch.stack(walked, dim=1)
