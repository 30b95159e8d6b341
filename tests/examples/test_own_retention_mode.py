"""The attention-map mode: against numbers worked out by hand, and through real commands by its registration alone."""

import functools
import importlib
import json
import math
import sys

import pytest
import torch

from lerobot_craft.anchors import retained
from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.modes import mode_named
from lerobot_craft.anchors.retained import Compared
from lerobot_craft.cli import main as craft
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Layer, adapter_for
from tests.examples.reading import EXAMPLES
from tests.policies.case import make_subject
from tests.policies.lerobot_cases import CASES


@pytest.fixture
def own(monkeypatch):
    """The example's module; its mode is known within the test only."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(retained, "_registered", {})
    module = importlib.import_module("own_retention_mode")
    retained.register_mode(module.AttentionMap)  # again, where the module was imported before
    return module


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Small policies by the name of their case."""
    known = {case.name: case for case in CASES}
    return functools.cache(lambda name: make_subject(known[name], tmp_path_factory.mktemp(name)))


def test_a_map_is_what_was_worked_out_by_hand(own):
    """Two heads, three tokens of which the last is padding. The second head looks evenly, the first at token 0 only."""
    first = [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    second = [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    mask = torch.tensor([[True, True, False]])
    # Mean of the heads: real queries give 0.75 to token 0 and 0.25 to token 1 each; there are two of them.
    expected = torch.tensor([[1.5, 0.5, 0.0]])
    assert own.attention_map(torch.tensor([[first, second]]), mask).equal(expected)
    even = torch.full((1, 2, 2), 0.5)  # without a dimension of heads
    assert own.attention_map(even, mask[:, :2]).equal(torch.ones(1, 2))


def test_the_drift_of_two_maps_is_what_was_worked_out_by_hand(own):
    mode = own.AttentionMap((Layer("", 0),))
    student, teacher = torch.tensor([[[1.5, 0.5]]]), torch.tensor([[[1.0, 1.0]]])
    compared = Compared("0", student, teacher, torch.ones(1, 1, dtype=torch.bool))
    assert mode.distance(compared, "mse").item() == pytest.approx(0.25)  # (0.5^2 + 0.5^2) / 2
    assert mode.distance(compared, "mse", scale=0.5).item() == pytest.approx(0.5)
    assert mode.distance(compared, "cosine").item() == pytest.approx(1 - 2 / math.sqrt(2.5 * 2))


@pytest.mark.parametrize("policy_type", ["pi0_fast", "act"])
def test_the_maps_of_a_policy_are_its_attention(own, named, policy_type):
    subject = named(policy_type)
    adapter = adapter_for(subject.policy.config)
    subject.policy.train(adapter.train_mode)
    retained = own.AttentionMap(adapter.resolve(subject.policy, "all"))
    found = retained.take(adapter, subject.policy, subject.batch, None)
    tokens = adapter.hidden(subject.policy, subject.batch, retained.layers)
    for layer in retained.layers:
        (values, valid), mask = found[str(layer)], tokens[layer].mask
        assert values.requires_grad
        assert valid.all()
        # Real queries spread 1 each, and none of it on padding.
        torch.testing.assert_close(values.sum(dim=(1, 2)), mask.sum(dim=1).float())
        assert values[:, 0][~mask].abs().max().item() < 1e-6 if (~mask).any() else True


def test_a_policy_that_it_cannot_read_is_named(own, named):
    subject = named("smolvla")
    adapter = adapter_for(subject.policy.config)
    with pytest.raises(CraftError, match="pi0_fast and act, not smolvla"):
        own.AttentionMap(adapter.resolve(subject.policy, "-1")).take(adapter, subject.policy, subject.batch, None)


def test_the_script_trains_with_it(own, process_as_it_was, tmp_path):
    assert own.main([f"--output_dir={tmp_path / 'out'}"]) == 0
    steps = [json.loads(line) for line in (tmp_path / "out/run/metrics.jsonl").read_text().splitlines()]
    measured = [step for step in steps if "retention_loss" in step]
    assert {step["mode"] for step in measured} == {"attention_map"}
    assert measured[0]["retention_loss"] == pytest.approx(0, abs=1e-6)  # the student is the teacher
    assert measured[-1]["retention_loss"] > 0


def test_commands_find_it_by_the_package_that_registers_it(
    own, craft_train, train_flags, anchor_data, tmp_path, capsys, monkeypatch
):
    cache = tmp_path / "anchors"
    old = {"craft__old_dataset__repo_id": "local/old", "craft__old_dataset__root": anchor_data / "old"}
    settings = {"craft__enabled": "true", "craft__retention_mode": "attention_map", "craft__num_anchors": 12}
    flags = train_flags("pi0_fast", tmp_path / "run", craft__anchor_cache_dir=cache, **old, **settings)
    retained._registered.clear()
    with pytest.raises(CraftError, match="must be one of hidden, token_ce, action; got 'attention_map'"):
        mode_named("attention_map")
    # As in a new process: the flag imports the module, and importing registers.
    monkeypatch.delitem(sys.modules, "own_retention_mode")
    assert craft_train(*flags, "--craft.layers_to_save=-2,-1", "--discover_packages_path=own_retention_mode") == 0
    manifest = Manifest.load(cache)
    assert manifest.kind == "attention_map"
    assert set(manifest.values["layer_scales"]) == set(manifest.values["layers_to_save"])
    capsys.readouterr()
    assert craft(["cache", "info", str(cache)]) == 0
    assert "attention_map: layers " in capsys.readouterr().out
