"""What in a checkpoint would run, told from what would not; tests/faults/test_untrusted.py plants the real thing."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.foreign_code import LEROBOTS_TOKENIZERS, TRUST, refuse_foreign_code, vouch_for


@pytest.fixture
def checkpoint(tmp_path):
    """Function that writes a preprocessor of these steps and returns a policy's config."""

    def config(*steps, **settings):
        (tmp_path / "policy_preprocessor.json").write_text(json.dumps({"steps": steps}))
        return SimpleNamespace(pretrained_path=tmp_path, **settings)

    return config


@pytest.fixture
def tokenizer(tmp_path):
    """Function that makes a tokenizer's directory with a Python file and returns its name."""

    def made(code, auto_map):
        directory = tmp_path / "tokenizer"
        directory.mkdir()
        (directory / "module.py").write_text(code)
        (directory / "processor_config.json").write_text(json.dumps({"auto_map": auto_map} if auto_map else {}))
        return str(directory)

    return made


def test_stock_pi0_fast_names_the_tokenizers_that_are_lerobots_own():
    from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig

    defaults = {field.name: field.default for field in dataclasses.fields(PI0FastConfig)}
    assert {defaults["text_tokenizer_name"], defaults["action_tokenizer_name"]} == LEROBOTS_TOKENIZERS


def test_a_policy_without_a_checkpoint_and_stock_names_pass():
    config = SimpleNamespace(pretrained_path=None, action_tokenizer_name="lerobot/fast-action-tokenizer")
    refuse_foreign_code(config)


@pytest.mark.parametrize(
    "step",
    [
        {"registry_name": "device_processor", "config": {"device": "cpu"}},
        {"class": "lerobot.processor.device_processor.DeviceProcessorStep"},
        {"registry_name": "tokenizer_processor", "config": {"tokenizer_name": "somebody/tokenizer"}},
    ],
)
def test_steps_of_lerobot_pass(step, checkpoint):
    refuse_foreign_code(checkpoint(step))


@pytest.mark.parametrize(
    "named",
    [
        "os.system",
        "subprocess.Popen",
        "builtins.exec",
        "not_imported_yet.Step",
        "lerobot.processor.device_processor.torch",
        "lerobot.nothing.Step",
        "Step",
        "",
    ],
)
def test_any_other_class_is_refused(named, checkpoint, monkeypatch):
    config = checkpoint({"class": named, "config": {}})
    with pytest.raises(CraftError, match="no processor step"):
        refuse_foreign_code(config)
    monkeypatch.setenv(TRUST, "1")
    refuse_foreign_code(config)


@pytest.mark.parametrize("key", ["action_tokenizer_name", "paligemma_tokenizer_name", "text_tokenizer_name"])
def test_a_tokenizer_of_somebody_else_on_the_hub_is_refused(key, checkpoint):
    with pytest.raises(CraftError, match="'somebody/tokenizer', and lerobot would run whatever code"):
        refuse_foreign_code(checkpoint(**{key: "somebody/tokenizer"}))
    with pytest.raises(CraftError, match="'somebody/tokenizer'"):
        refuse_foreign_code(checkpoint({"registry_name": "x", "config": {key: "somebody/tokenizer"}}))


def test_code_that_a_tokenizer_names_is_refused_unless_it_is_an_installed_packages(tokenizer, checkpoint, tmp_path):
    name = tokenizer("class Own: ...", {"AutoProcessor": "module.Own"})
    with pytest.raises(CraftError, match=r"brings code of its own \(module\.py\)"):
        refuse_foreign_code(checkpoint(action_tokenizer_name=name))
    vouch_for(tmp_path / "tokenizer" / "module.py")
    refuse_foreign_code(checkpoint(action_tokenizer_name=name))
    (tmp_path / "tokenizer" / "other.py").write_text("")
    with pytest.raises(CraftError, match=r"\(other\.py\)"):
        refuse_foreign_code(checkpoint(action_tokenizer_name=name))


@pytest.mark.parametrize("reference", ["somebody/repo--module.Class", "/elsewhere/module.Class", "linked/module.Class"])
def test_code_that_is_named_elsewhere_is_refused(reference, tokenizer, checkpoint, tmp_path):
    name = tokenizer("", {"AutoTokenizer": [None, reference]})
    vouch_for(tmp_path / "tokenizer" / "module.py")
    with pytest.raises(CraftError, match=re.escape(f"({reference})")):
        refuse_foreign_code(checkpoint(action_tokenizer_name=name))


def test_code_that_nothing_names_may_lie_there(tokenizer, checkpoint):
    refuse_foreign_code(checkpoint(action_tokenizer_name=tokenizer("import os", None)))


@pytest.mark.parametrize("content", ["", "[]", '{"steps": null}', '{"steps": [1]}', '{"steps": [{}]}', "[" * 100_000])
def test_a_damaged_file_is_left_to_the_loader(content, checkpoint, tmp_path):
    config = checkpoint()
    (tmp_path / "policy_preprocessor.json").write_text(content)
    refuse_foreign_code(config)
