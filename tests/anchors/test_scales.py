"""The unit of the budget, on values whose mean and spread are known."""

import pytest
import torch

from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.manifest import ShardReader, write_shard
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.modes.hidden import Hidden
from lerobot_craft.anchors.values import measure_scales
from lerobot_craft.policies import Layer


def shards(directory, columns, rows):
    """The columns, dealt into shards of so many rows."""
    readers = []
    total = len(columns["instruction"])
    for index, start in enumerate(range(0, total, rows)):
        part = torch.arange(start, min(start + rows, total))
        dealt = {n: c.take(part) if isinstance(c, Ragged) else c[part] for n, c in columns.items()}
        write_shard(directory, index, dealt)
        readers.append(ShardReader(directory / f"shard-{index:05d}.safetensors"))
    return readers


def test_own_errors_are_means_over_demonstrations_per_instruction(tmp_path):
    columns = {
        "instruction": torch.tensor([0, 0, 1, 1, 0]),
        "cross": torch.tensor([False, False, True, True, True]),
        "own_error.mse": torch.tensor([1.0, 3.0, 10.0, 20.0, 100.0]),
    }
    scales, layers = measure_scales(shards(tmp_path, columns, 2), 2, Action())
    assert layers == {}
    assert [(s.source, s.n, s.values) for s in scales] == [
        ("demonstrations", 2, {"mse": 2.0}),  # the cross anchor has another kind of error
        ("self", 2, {"mse": 15.0}),
    ]


@pytest.mark.parametrize("rows", [2, 3, 100])
@pytest.mark.parametrize("per_token", [False, True])
def test_spread_is_the_mean_drift_from_the_instructions_own_mean(tmp_path, rows, per_token):
    torch.manual_seed(1)
    features, instruction = torch.randn(40, 6) + 5, torch.arange(40) % 3
    columns = {"instruction": instruction}
    if per_token:  # two tokens per anchor
        columns["hidden.2"] = Ragged(features, torch.full((20,), 2))
        columns["instruction"] = instruction[:20]
        instruction = instruction[:20].repeat_interleave(2)
    else:
        columns |= {"target_features": features, "target_valid": torch.ones(40, dtype=torch.bool)}
    pooling = "none" if per_token else "mean_masked"
    retained = Hidden((Layer("", 2),), pooling=pooling)
    scales, layers = measure_scales(shards(tmp_path, columns, rows), 3, retained)
    variances = []
    for index, scale in enumerate(scales):
        own = features[instruction == index]
        offset = own - own.mean(dim=0)
        assert scale.source == "spread"
        assert scale.n == int((columns["instruction"] == index).sum())
        assert scale.values["mse"] == pytest.approx(offset.square().mean().item(), rel=1e-5)
        assert scale.values["l1"] == pytest.approx(offset.abs().mean().item(), rel=1e-5)
        cosine = 1 - torch.cosine_similarity(own, own.mean(dim=0).expand_as(own)).mean().item()
        assert scale.values["cosine"] == pytest.approx(cosine, rel=1e-3)
        variances.append(offset.square().mean(dim=1))
    assert layers["2"]["mse"] == pytest.approx(torch.cat(variances).mean().item(), rel=1e-5)


def test_features_without_a_real_token_count_for_nothing(tmp_path):
    columns = {
        "instruction": torch.zeros(3, dtype=torch.int64),
        "target_features": torch.tensor([[0.0], [2.0], [1e6]]),
        "target_valid": torch.tensor([True, True, False]),
    }
    (scale,), _ = measure_scales(shards(tmp_path, columns, 5), 1, Hidden((Layer("", 0),), pooling="mean_masked"))
    assert scale.values["mse"] == 1.0
