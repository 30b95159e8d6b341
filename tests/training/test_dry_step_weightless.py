import math

import pytest
import torch

from lerobot_craft.training.dry_step import (
    Ledger,
    ReadsForTheLog,
    UnknownValueError,
    run_without_values,
    without_memory,
)


@pytest.fixture
def unknown():
    with without_memory(), Ledger(run_without_values):
        yield


def test_a_loss_that_is_read_for_the_log_is_not_a_number(unknown):
    assert math.isnan(torch.zeros(3).mean().item())


def test_an_array_for_the_log_is_not_a_number(unknown):
    with ReadsForTheLog():
        assert math.isnan(torch.zeros(3).detach().cpu().numpy().tolist()[2])
        assert math.isnan(torch.zeros(3).tolist()[0])


def test_a_decision_is_refused(unknown):
    with pytest.raises(UnknownValueError, match="decides by a value"):
        bool(torch.zeros(3, dtype=torch.bool).any())


def test_every_position_of_a_mask_is_real(unknown):
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.zeros(2, 3, 5)[mask].shape == (6, 5)
    assert mask.nonzero().shape == (6, 2)
    assert torch.zeros(2, 3)[:, torch.tensor([0, 2])].shape == (2, 2)


def test_small_real_tensors_keep_their_values():
    lengths = torch.tensor([3, 5])
    with without_memory(), Ledger(run_without_values):
        assert int(lengths.max()) == 5
