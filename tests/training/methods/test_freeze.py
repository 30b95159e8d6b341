"""Names, prefixes and patterns of what is not trained."""

import copy
from collections import OrderedDict

import pytest
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.freeze import Freeze, freeze_readout


def policy():
    inner = OrderedDict(
        eye=nn.Linear(2, 2), layers=nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), head=nn.Linear(2, 1)
    )
    whole = nn.Module()
    whole.model = nn.ModuleDict(inner)
    return whole


def trained_after(pattern, module=None):
    module = policy() if module is None else module
    Freeze().freeze(module, CraftConfig(enabled=True, method="freeze", freeze=pattern), None)
    return [name.removeprefix("model.") for name, p in module.named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("pattern", "trained"),
    [
        ("model.layers", ["eye.weight", "eye.bias", "head.weight", "head.bias"]),
        ("model.layers.1, model.head", ["eye.weight", "eye.bias", "layers.0.weight", "layers.0.bias"]),
        ("*.bias", ["eye.weight", "layers.0.weight", "layers.1.weight", "head.weight"]),
        ("*layers.?.weight,*eye", ["layers.0.bias", "layers.1.bias", "head.weight", "head.bias"]),
        ("model.eye.weight,model.layers,model.head", ["eye.bias"]),
    ],
)
def test_what_is_named_is_frozen_and_nothing_else(pattern, trained):
    assert trained_after(pattern) == trained


@pytest.mark.parametrize("pattern", ["model.lay", "model.layers,model.tail", "layers"])
def test_a_name_that_matches_nothing_is_refused_with_the_names_there_are(pattern):
    module = policy()
    with pytest.raises(CraftError, match=r"Its parts are model\.eye, model\.layers, model\.head\."):
        trained_after(pattern, module)
    assert all(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("pattern", ["model", "*", "*.weight,*.bias"])
def test_freezing_everything_is_refused(pattern):
    with pytest.raises(CraftError, match="leaves nothing to train"):
        trained_after(pattern)


def test_what_was_frozen_before_does_not_count_as_left_to_train():
    module = policy()
    module.model["eye"].requires_grad_(False)
    with pytest.raises(CraftError, match="leaves nothing to train"):
        trained_after("model.layers,model.head", module)


def test_a_tied_weight_is_found_under_each_of_its_names():
    module = policy()
    module.model["head"].weight = module.model["eye"].weight
    assert "eye.weight" not in trained_after("model.head", module)


@pytest.mark.parametrize("pattern", ["", " , "])
def test_without_names_it_is_refused(pattern):
    with pytest.raises(CraftError, match=r"needs --craft\.freeze.*model\.eye"):
        trained_after(pattern)


def test_readout_stands_for_the_output_layer(teachers):
    teacher = teachers("smolvla")
    by_word, by_call = copy.deepcopy(teacher.policy), copy.deepcopy(teacher.policy)
    before = {name for name, p in teacher.policy.named_parameters() if p.requires_grad}
    Freeze().freeze(by_word, CraftConfig(enabled=True, method="freeze", freeze="readout"), teacher.config)
    frozen = freeze_readout(by_call, adapter_for(teacher.config))
    for module in (by_word, by_call):
        assert before - {n for n, p in module.named_parameters() if p.requires_grad} == before & set(frozen)
    assert "model.action_out_proj.weight" in frozen


def test_an_adapter_without_readout_is_refused(teachers):
    adapter = adapter_for(teachers("smolvla").config)
    adapter.readout = ()
    with pytest.raises(CraftError, match="does not say what its readout is"):
        freeze_readout(teachers("smolvla").policy, adapter)


@pytest.mark.parametrize("pattern", ["readout", "model.action_out_proj", "model.action_out_proj.weight"])
def test_lora_on_what_is_frozen_is_frozen_with_it(policy_context, pattern):
    from lerobot.configs.default import PeftConfig

    context = policy_context(peft=PeftConfig(), old=None)  # the default targets have the output layer among them
    config = CraftConfig(enabled=True, method="freeze", freeze=pattern)

    def adapters():
        return [name for name, p in context.policy.named_parameters() if p.requires_grad and "action_out_proj" in name]

    assert len(adapters()) == 2
    Freeze().freeze(context.policy, config, context.teacher.config)
    assert not adapters()
    assert context.trained
