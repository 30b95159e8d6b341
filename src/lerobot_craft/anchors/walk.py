"""States of cross anchors that the teacher itself would reach: walks under old instructions, without a simulator.

A new frame under an old instruction asks the teacher only about where the new task happens, not about where the old
task would lead: turning a faucet the other way puts the hand on its other side. So the teacher walks. From the first
frame of a new episode (or from an old frame, see `rows.py`) it acts under the old instruction, a motion model
(`motion.py`) moves the robot's own state, and each state on the way becomes an anchor. The rest of the state stays. It
may be drawn from the teacher's statistics at the start, to walk among objects that the new data do not show.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lerobot_craft.anchors.cross import Stats, anchor_generator, draw_states, limits_of, spread_of
from lerobot_craft.anchors.motion import Motion

# (states [walks, S], step of the walk) -> the teacher's next actions [walks, h, A] as the robot executes them
Act = Callable[[Tensor, int], Tensor]

JITTER = 0.1  # in standard deviations per step, on driven dimensions: turns a walk into a tube
_STREAM = 2**40  # separates the walks' random numbers from those of the anchors


def walk(
    starts: Tensor, drawn: Sequence[bool], steps: int, act: Act, motion: Motion, stats: Stats, seed: int
) -> Tensor:
    """The states of every walk, [walks, steps, S], including the start.

    Args:
        starts: States [walks, S] of first frames.
        drawn: Per walk: resample the object's state from the statistics?
        steps: Chunks per walk.
        act: Asks the teacher.
        motion: Moves the robot's own state.
        stats: The teacher's statistics of the state.
        seed: Seed of draws and jitter.
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
        # Outside the teacher's data its own walk is meaningless, so clamp to it. Objects stay where they were put.
        state = torch.where(motion.driven, (state + spread * noise).clamp(low, high), state)
        walked.append(state)
    return torch.stack(walked, dim=1)
