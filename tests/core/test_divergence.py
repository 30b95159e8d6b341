"""Checksums see every bit; tests/distributed compares them over ranks."""

import pytest
import torch

from lerobot_craft.core import divergence
from lerobot_craft.core.divergence import checksum, find_divergence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_checksum_is_the_sum_of_the_bits_block_by_block(dtype, monkeypatch):
    tensor = torch.randn(7, 5).to(dtype)
    whole = checksum(tensor)
    assert whole.dtype == torch.int64
    monkeypatch.setattr(divergence, "_BLOCK", 4)
    assert checksum(tensor) == whole
    assert checksum(tensor.T) == whole, "also of a tensor with another layout"


@pytest.mark.parametrize("value", [1.0, -0.0, float("nan"), float("inf"), 1e-45])
def test_it_changes_with_one_element(value):
    tensor = torch.zeros(9)
    before = checksum(tensor)
    tensor[4] = value
    assert checksum(tensor) != before


def test_one_process_agrees_with_itself():
    assert find_divergence({"weight": torch.ones(2)}, {"step": 1}) is None
