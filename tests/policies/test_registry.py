import sys

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.policies import (
    ENTRY_POINT_GROUP,
    PolicyAdapter,
    adapter,
    adapter_for,
    register_adapter,
    supported_policies,
)
from lerobot_craft.policies.act import ACTAdapter
from tests.policies.test_adding_a_policy import install

OURS = ["act", "diffusion", "pi0", "pi05", "pi0_fast", "smolvla"]


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Installs a distribution that declares adapters, next to real modules."""

    def declare(adapters, **modules):
        install(tmp_path, {ENTRY_POINT_GROUP: adapters})
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    return declare


def config_of(policy_type):
    from lerobot.policies import make_policy_config

    return make_policy_config(policy_type, device="cpu")


@pytest.mark.parametrize("policy_type", OURS)
def test_each_policy_has_its_adapter(policy_type):
    assert adapter_for(config_of(policy_type)).policy_type == policy_type


@pytest.mark.parametrize("policy_type", ["pi0", "pi05", "pi0_fast"])
def test_a_config_that_derives_from_a_known_one_has_its_adapter(named, policy_type):
    config = named(policy_type).policy.config
    assert config.type == f"{policy_type}_tiny"
    assert adapter_for(config).policy_type == policy_type


def test_an_unknown_type_is_told_what_is_known_and_how_to_add_one():
    with pytest.raises(CraftError, match="no adapter for the policy type 'tdmpc'") as refusal:
        adapter_for(config_of("tdmpc"))
    assert ", ".join(OURS) in str(refusal.value)
    assert "docs/adding-a-policy.md" in str(refusal.value)


def test_distributions_are_read_once_until_one_is_installed(tmp_path, monkeypatch):
    read, stock = [], adapter.entry_points

    def counted(**selection):
        read.append(selection)
        return stock(**selection)

    monkeypatch.setattr(adapter, "entry_points", counted)
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        assert "mine" not in supported_policies()
    assert len(read) == 1
    install(tmp_path, {ENTRY_POINT_GROUP: {"mine": "mine:Mine"}})
    assert "mine" in supported_policies()


def test_an_installed_adapter_is_found(third_party):
    source = "from lerobot_craft.policies.act import ACTAdapter\nclass Mine(ACTAdapter):\n    policy_type = 'vqbet'\n"
    third_party({"vqbet": "found_craft:Mine"}, found_craft=source)
    assert "vqbet" in supported_policies()
    assert type(adapter_for(config_of("vqbet"))).__module__ == "found_craft"


@pytest.mark.parametrize(
    ("target", "source", "sentence"),
    [
        ("absent_craft:Mine", "", "absent_craft:Mine for tdmpc cannot be loaded: No module named"),
        ("broken_craft:Mine", "", "has no attribute 'Mine'"),
        (
            "broken_craft:Mine",
            "from lerobot_craft.policies import PolicyAdapter\nclass Mine(PolicyAdapter):\n    pass\n",
            "cannot be loaded: Can't instantiate abstract class Mine",
        ),
        ("broken_craft:Mine", "class Mine:\n    pass\n", "is not a PolicyAdapter"),
    ],
    ids=["no module", "no class", "unfinished", "something else"],
)
def test_an_installed_adapter_that_does_not_load_says_why(third_party, target, source, sentence):
    third_party({"tdmpc": target}, broken_craft=source)
    with pytest.raises(CraftError, match=sentence):
        adapter_for(config_of("tdmpc"))


@pytest.fixture
def _only_in_this_test(monkeypatch):
    monkeypatch.setattr(adapter, "_registered", {})


@pytest.mark.usefixtures("_only_in_this_test")
def test_a_script_registers_an_adapter_for_its_own_process():
    @register_adapter
    class Mine(ACTAdapter):
        policy_type = "vqbet"

    assert Mine.__name__ == "Mine"  # the decorator gives the class back
    assert "vqbet" in supported_policies()
    assert type(adapter_for(config_of("vqbet"))) is Mine


@pytest.mark.usefixtures("_only_in_this_test")
def test_a_registered_adapter_goes_before_an_installed_one_and_before_ours(third_party):
    source = "from lerobot_craft.policies.act import ACTAdapter\nclass Installed(ACTAdapter):\n    pass\n"
    third_party({"act": "found_craft:Installed"}, found_craft=source)
    assert type(adapter_for(config_of("act"))).__name__ == "Installed"
    mine = register_adapter(type("Mine", (ACTAdapter,), {}))
    assert type(adapter_for(config_of("act"))) is mine


@pytest.mark.usefixtures("_only_in_this_test")
@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        (type("Mine", (PolicyAdapter,), {"policy_type": "act"}), "Mine lacks output_kind, .* demonstration, fix"),
        (object, "not a class of PolicyAdapter"),
        (ACTAdapter(), "not a class of PolicyAdapter"),
    ],
    ids=["unfinished", "something else", "no class"],
)
def test_what_is_no_adapter_is_not_registered(adapter, sentence):
    with pytest.raises(CraftError, match=sentence):
        register_adapter(adapter)
    assert type(adapter_for(config_of("act"))) is ACTAdapter
