"""Cooper's nuPI optimizer, started from zeros, is our `pi` rule."""

import pytest
import torch
from cooper.optim import nuPI, nuPIInitType
from hypothesis import given
from hypothesis import strategies as st

from lerobot_craft.core import Dual, Multipliers


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=50),
    st.floats(1e-5, 1e-3),  # so small that lambda = 1 does not reach its clips
    st.floats(0, 10),
    st.floats(0, 0.99),
)
def test_pi_follows_nupi(violations, lr, gain, smoothing):
    reference = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    optimizer = nuPI(
        [reference],
        lr=lr,
        Kp=torch.tensor(gain, dtype=torch.float64),
        Ki=torch.tensor(1.0, dtype=torch.float64),
        ema_nu=smoothing,
        init_type=nuPIInitType.ZEROS,
        maximize=True,
    )
    dual = Dual("pi", 1.0, lr, proportional_gain=gain, smoothing=smoothing)
    ours = Multipliers(dual)
    for violation in violations:
        reference.grad = torch.tensor([violation], dtype=torch.float64)
        optimizer.step()
        assert ours.update([violation]) == pytest.approx(reference.tolist(), abs=1e-12)
