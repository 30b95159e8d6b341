"""States that a plan needs before the teacher can be asked: the states along walks, and those of old frames' mates."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.anchors.datasets import STATE, MadeStates
from lerobot_craft.anchors.plan import Plan
from lerobot_craft.anchors.teacher_walk import walked_states
from lerobot_craft.lerobot_api.preload_columns import numbers
from lerobot_craft.teacher.load import Teacher


def make_states(plan: Plan, teacher: Teacher, policy: Any, datasets: Sequence[Any], batch_size: int) -> MadeStates:
    """Walk the plan's walks (see `walked_states`) and read the states of its mates."""
    walked = walked_states(plan, teacher, policy, datasets, batch_size)
    return MadeStates(walked, _mates(plan, datasets))


def _mates(plan: Plan, datasets: Sequence[Any]) -> Tensor | None:
    rows = np.flatnonzero(plan.mate >= 0)
    mates: Tensor | None = None
    for dataset in np.unique(plan.dataset[rows]):
        of_dataset = rows[plan.dataset[rows] == dataset]
        states = numbers(datasets[dataset], STATE)[plan.mate[of_dataset]].float().view(len(of_dataset), -1)
        mates = torch.zeros(len(plan), states.shape[1]) if mates is None else mates
        mates[of_dataset] = states
    return mates
