"""Checksums see every bit; tests/distributed compares them over ranks."""

import pytest
import torch

from lerobot_craft.core import ranks
from lerobot_craft.core.ranks import checksum, find_divergence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("first", [0, 1])
def test_every_element_counts_wherever_a_tensor_begins_and_ends(dtype, first, monkeypatch):
    monkeypatch.setattr(ranks, "_BLOCK", 4)
    tensor = torch.zeros(24).to(dtype)[first:]
    sums = {int(checksum(tensor))}
    for index in range(len(tensor)):
        tensor[index] = 1
        sums.add(int(checksum(tensor)))
    assert len(sums) == len(tensor) + 1
    assert checksum(tensor).dtype == torch.int64
    assert checksum(tensor[:0]) == 0


@pytest.mark.parametrize("value", [1.0, -0.0, float("nan"), float("inf"), 1e-45])
def test_it_changes_with_one_element(value):
    tensor = torch.zeros(9)
    before = checksum(tensor)
    tensor[4] = value
    assert checksum(tensor) != before


def test_one_process_agrees_with_itself():
    assert find_divergence({"weight": torch.ones(2)}, {"step": 1}) is None
