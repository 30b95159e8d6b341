"""What in a checkpoint would run, told from what would not; tests/faults/test_untrusted.py plants the real thing."""

import ast
import dataclasses
import json
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import lerobot
import pytest

import lerobot_craft.tiny  # noqa: F401  registers its policies and steps
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.foreign_code import (
    LEROBOTS_TOKENIZERS,
    READ_POLICIES,
    TRUST,
    TRUSTING_STEPS,
    refuse_foreign_code,
    vouch_for,
)

LEROBOT = Path(lerobot.__file__).parent
# Types of lerobot 0.6.1 that load what a config names with trust_remote_code=True.
TRUSTING_POLICIES = {"gaussian_actor", "groot", "wall_x"}


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
        {"registry_name": "pi0_new_line_processor"},
        {"class": "lerobot.policies.pi0.processor_pi0.Pi0NewLineProcessor"},
        {"registry_name": "xvla_image_scale"},
        {"registry_name": "craft_action_tokenizer_processor"},
    ],
)
def test_steps_of_lerobot_and_of_ours_pass(step, checkpoint):
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
        # These load a model with trust_remote_code=True, or come from where such steps are.
        "lerobot.rewards.topreward.processor_topreward.TOPRewardEncoderProcessorStep",
        "lerobot.rewards.robometer.processor_robometer.RobometerEncoderProcessorStep",
        "lerobot.policies.groot.processor_groot.GrootN17VLMEncodeStep",
        "lerobot.processor.RewardClassifierProcessorStep",
        "lerobot.processor.hil_processor.RewardClassifierProcessorStep",
        "lerobot.robots.so_follower.robot_kinematic_processor.EEBoundsAndSafety",
    ],
)
def test_any_other_class_is_refused(named, checkpoint, monkeypatch):
    config = checkpoint({"class": named, "config": {}})
    with pytest.raises(CraftError, match="no processor step"):
        refuse_foreign_code(config)
    monkeypatch.setenv(TRUST, "1")
    refuse_foreign_code(config)


@pytest.mark.parametrize(
    "named",
    ["reward_classifier_processor", "groot_n1_7_vlm_encode_v1", "wall_x_task_processor", "unheard_of", "", None, ["x"]],
)
def test_a_registered_name_is_judged_by_its_class(named, checkpoint):
    import lerobot.policies  # noqa: F401  registers the steps of all policies

    with pytest.raises(CraftError, match="no processor step"):
        refuse_foreign_code(checkpoint({"registry_name": named, "config": {}}))


def test_a_trusting_step_is_refused_whoever_imported_or_exports_it(checkpoint, monkeypatch):
    from lerobot.rewards.topreward import processor_topreward

    plugin = ModuleType("some_plugin")
    plugin.Step = processor_topreward.TOPRewardEncoderProcessorStep
    monkeypatch.setitem(sys.modules, "some_plugin", plugin)
    for step in (
        {"class": "some_plugin.Step"},
        {"registry_name": "topreward_encoder"},
        {"class": "lerobot.rewards.topreward.processor_topreward.TOPRewardEncoderProcessorStep"},
    ):
        with pytest.raises(CraftError, match="no processor step"):
            refuse_foreign_code(checkpoint(step))


def test_a_module_that_may_not_run_is_not_imported_to_be_judged(checkpoint, monkeypatch):
    imported = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    for named in ("not_imported_yet.Step", "lerobot.scripts.lerobot_train.Step", "lerobot.policies.groot.x.Step"):
        monkeypatch.delitem(sys.modules, named.rpartition(".")[0], raising=False)
        with pytest.raises(CraftError, match="no processor step"):
            refuse_foreign_code(checkpoint({"class": named}))
    assert imported == []


PLUGIN = """
from lerobot.processor import ProcessorStep, ProcessorStepRegistry

@ProcessorStepRegistry.register("plugin_step")
class PluginStep(ProcessorStep):
    ...
"""


def test_a_plugins_step_passes_also_where_it_is_registered_with_the_policy(checkpoint, tmp_path, monkeypatch):
    from lerobot.processor import ProcessorStepRegistry

    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "configuration_plugin.py").write_text("class PluginConfig:\n    pretrained_path = None\n")
    (tmp_path / "modeling_plugin.py").write_text(PLUGIN)
    import configuration_plugin

    config = configuration_plugin.PluginConfig()
    config.pretrained_path = checkpoint({"registry_name": "plugin_step"}).pretrained_path
    try:
        refuse_foreign_code(config)
        refuse_foreign_code(checkpoint({"class": "modeling_plugin.PluginStep"}))
    finally:
        ProcessorStepRegistry.unregister("plugin_step")
        for name in ("configuration_plugin", "modeling_plugin"):
            sys.modules.pop(name, None)


def test_a_checkpoint_of_the_hub_is_looked_at_where_lerobot_will_find_it(tmp_path, monkeypatch):
    repository = tmp_path / "models--me--act"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (snapshot / name).write_text(json.dumps({"steps": []}))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuse_foreign_code(SimpleNamespace(pretrained_path=Path("me/act"), pretrained_revision=None))
    (snapshot / "policy_postprocessor.json").write_text(json.dumps({"steps": [{"class": "os.mkdir"}]}))
    with pytest.raises(CraftError, match=r"of me/act name 'os\.mkdir', which is no processor step"):
        refuse_foreign_code(SimpleNamespace(pretrained_path="me/act"))
    with pytest.raises(CraftError, match=r"of me/other cannot be looked at .* `hf download me/other` and name its"):
        refuse_foreign_code(SimpleNamespace(pretrained_path="me/other"))


def policy_types():
    """Policy type -> config class, of lerobot's own policies."""
    import lerobot.policies  # noqa: F401  registers them
    from lerobot.configs import PreTrainedConfig

    known = PreTrainedConfig.get_known_choices()
    return {name: kind for name, kind in known.items() if kind.__module__.startswith("lerobot.")}


@pytest.mark.parametrize("name", sorted(TRUSTING_POLICIES))
def test_types_that_trust_remote_code_are_refused(name, monkeypatch):
    config = object.__new__(policy_types()[name])  # as some cannot be made without their packages
    config.pretrained_path = None
    with pytest.raises(CraftError, match=f"of the type '{name}' names with trust_remote_code=True, .* set {TRUST}=1"):
        refuse_foreign_code(config)
    monkeypatch.setenv(TRUST, "1")
    refuse_foreign_code(config)


def test_all_other_types_pass():
    others = {name: kind for name, kind in policy_types().items() if name not in TRUSTING_POLICIES}
    assert len(others) == len(READ_POLICIES)
    for kind in others.values():
        config = object.__new__(kind)
        config.pretrained_path = None
        refuse_foreign_code(config)


def trees(place):
    """Python files below a directory of lerobot, parsed; by the name of the package or file they are in."""
    for file in sorted(place.rglob("*.py")):
        yield file.relative_to(place).parts[0], ast.parse(file.read_text())


def trusts(node):
    """Whether code passes, or stores, trust_remote_code with another value than False."""
    if isinstance(node, ast.keyword):
        pairs = [(node.arg, node.value)]
    elif isinstance(node, ast.AnnAssign):
        pairs = [(getattr(node.target, "id", None), node.value)]
    elif isinstance(node, ast.Dict):
        pairs = [(getattr(key, "value", None), value) for key, value in zip(node.keys, node.values, strict=True)]
    else:
        return False
    return any(name == "trust_remote_code" and getattr(value, "value", None) is not False for name, value in pairs)


def runs_code(node):
    """Whether code could run what it reads in another way: unpickling, evaluating, importing what a variable names."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        return any(name.split(".")[0] in {"pickle", "dill", "cloudpickle", "joblib", "marshal"} for name in names) or (
            any(name.startswith("lerobot.rewards") for name in names)
        )
    if not isinstance(node, ast.Call):
        return False
    called = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
    named = node.args and isinstance(node.args[0], ast.Constant)
    return called in {"eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load"} or (
        called.endswith("import_module") and not named
    )


def test_the_lists_are_what_the_installed_lerobot_does():
    """A new release, or a policy that begins to trust, is noticed here: read it before it is added to a list."""
    policies, processors = LEROBOT / "policies", LEROBOT / "processor"
    packages = {kind.__module__.split(".")[2] for kind in policy_types().values()}
    trusting = {name for name, tree in trees(policies) if any(map(trusts, ast.walk(tree)))}
    assert trusting == TRUSTING_POLICIES | {"pi0_fast"}, "pi0_fast's two tokenizers are checked by their names"
    assert packages == READ_POLICIES | TRUSTING_POLICIES
    assert {name for name, tree in trees(processors) if any(map(trusts, ast.walk(tree)))} == {"tokenizer_processor.py"}
    other = {
        name for place in (policies, processors) for name, tree in trees(place) if any(map(runs_code, ast.walk(tree)))
    }
    assert other == {"factory.py", "pipeline.py", "hil_processor.py"}, "who imports modeling files, steps and rewards"
    assert {step.rpartition(".")[0] for step in TRUSTING_STEPS} == {"lerobot.processor.hil_processor"}


@pytest.mark.parametrize("key", ["action_tokenizer_name", "paligemma_tokenizer_name", "text_tokenizer_name"])
def test_a_tokenizer_of_somebody_else_on_the_hub_is_refused(key, checkpoint):
    with pytest.raises(CraftError, match="'somebody/tokenizer', and lerobot would run whatever code"):
        refuse_foreign_code(checkpoint(**{key: "somebody/tokenizer"}))
    with pytest.raises(CraftError, match="'somebody/tokenizer'"):
        refuse_foreign_code(checkpoint({"registry_name": "device_processor", "config": {key: "somebody/tokenizer"}}))


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
