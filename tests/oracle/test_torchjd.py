"""TorchJD solves the projection as a quadratic program; ours is the closed form for two gradients."""

import pytest
import torch
from hypothesis import assume, given
from torchjd.linalg import QuadprogProjector

from lerobot_craft.core import Gram, Surgery, merge_weights
from tests.core.gradient_lists import gradient_pairs, vector

TASK_ONLY = torch.tensor([1.0, 0.0], dtype=torch.float64)  # project the task gradient; the retention gradient is free


@given(gradient_pairs())
def test_projection_is_that_onto_the_dual_cone(pair):
    t, r = (vector(g) / vector(g).norm() for g in pair)
    gram = torch.stack((t, r)) @ torch.stack((t, r)).T
    assume(torch.linalg.eigvalsh(gram).min() > 1e-6)  # quadprog needs a positive definite matrix
    expected = QuadprogProjector(norm_eps=0.0, reg_eps=0.0)(TASK_ONLY, gram)
    weights = merge_weights(Gram(*gram.flatten()[[0, 1, 3]].tolist()), 0.0, Surgery(conflict_threshold=0.0))
    assert (weights.task, weights.retention) == pytest.approx(expected.tolist(), abs=1e-12)
