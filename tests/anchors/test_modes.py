"""A retention mode is found by its name: ours, one of this process, one of an installed distribution."""

import dataclasses
import re
import sys
from pathlib import Path

import pytest

from lerobot_craft.anchors import retained
from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.modes import ENTRY_POINT_GROUP, Retained, known_modes, mode_named, register_mode
from lerobot_craft.anchors.modes.hidden import Hidden
from lerobot_craft.anchors.recipe import AnchorConfig
from lerobot_craft.anchors.verify import reproduce
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Layer, adapter_for
from lerobot_craft.training.config import CraftConfig
from tests.policies.test_adding_a_policy import install

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-retention-mode.md"
OURS = ["hidden", "token_ce", "action"]


@pytest.fixture
def source():
    """The mode on the page."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    return code


@pytest.fixture(autouse=True)
def _registered_here(monkeypatch):
    monkeypatch.setattr(retained, "_registered", {})


@pytest.mark.parametrize("name", OURS)
def test_each_of_ours_is_found(name):
    assert mode_named(name).mode == name
    assert known_modes() == OURS


def test_an_unknown_one_is_told_what_is_known_and_how_to_add_one():
    with pytest.raises(CraftError, match="must be one of hidden, token_ce, action; got 'attention_map'") as refusal:
        mode_named("attention_map")
    assert "docs/adding-a-retention-mode.md" in str(refusal.value)


def test_an_installed_one_is_found_and_goes_before_ours(tmp_path, monkeypatch, source):
    install(
        tmp_path, {ENTRY_POINT_GROUP: {"mean_state": "installed_mode:MeanState", "hidden": "installed_mode:MeanState"}}
    )
    (tmp_path / "installed_mode.py").write_text(source)
    monkeypatch.delitem(sys.modules, "installed_mode", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert mode_named("mean_state").__name__ == "MeanState"
    assert mode_named("hidden").__name__ == "MeanState"
    assert CraftConfig(retention_mode="mean_state").retention_mode == "mean_state"


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("nowhere:Mode", "cannot be loaded"),
        ("json:Mode", "cannot be loaded"),
        ("json:loads", "is not a class of Retained"),
    ],
)
def test_an_installed_one_that_does_not_load_says_why(tmp_path, monkeypatch, target, sentence):
    install(tmp_path, {ENTRY_POINT_GROUP: {"broken": target}})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CraftError, match=sentence):
        mode_named("broken")


def test_an_unfinished_one_is_not_registered():
    class Unfinished(Retained):
        pass

    with pytest.raises(CraftError, match="Unfinished lacks mode, take"):
        register_mode(Unfinished)
    with pytest.raises(CraftError, match="is not a class of Retained"):
        register_mode(int)


@pytest.mark.parametrize("policy_type", ["pi0_fast", "smolvla"])
def test_the_mode_on_the_page_makes_a_cache_that_its_teacher_reproduces(build, teachers, source, policy_type):
    exec(compile(source, str(PAGE), "exec"), {"__name__": "page"})  # noqa: S102  # registers
    directory = build(policy_type, retention_mode="mean_state", num_anchors=6)
    manifest = Manifest.load(directory)
    (layer,) = manifest.values["layers_to_save"]
    assert manifest.kind == "mean_state"
    assert manifest.columns[f"mean_state.{layer}"].ragged
    assert manifest.scales[0].source == "spread"
    assert manifest.scales[0].values["mse"] > 0
    assert reproduce(open_cache(directory), teachers(policy_type)).holds
    retained._registered.clear()
    with pytest.raises(CraftError, match="kind: retention_mode must be one of"):
        Manifest.load(directory)


@pytest.mark.parametrize(("given", "layers"), [(None, "-2,-1"), ("all", "all")])
def test_the_notes_name_for_several_layers_is_hidden(given, layers, teachers):
    teacher = teachers("pi0_fast")
    adapter = adapter_for(teacher.config)
    named, plain = (
        AnchorConfig(retention_mode=name, layers_to_save=given) for name in ("hidden_multi_layer", "hidden")
    )
    found = named.retained(adapter, teacher.policy)
    assert found == dataclasses.replace(plain, layers_to_save=layers).retained(adapter, teacher.policy)
    assert mode_named("hidden_multi_layer") is Hidden


def test_settings_are_kept_and_one_draw_is_one():
    layers = (Layer("", 1),)
    assert Hidden(layers, pooling="cls_token").once() == Hidden(layers, pooling="cls_token")
    with pytest.raises(CraftError, match="hidden retention needs layers"):
        Hidden()
    with pytest.raises(dataclasses.FrozenInstanceError):
        Hidden(layers).pooling = "none"
