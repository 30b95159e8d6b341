import sys
from types import ModuleType, SimpleNamespace

import pytest

from lerobot_craft.lerobot_api.train_steps import eval_flags


def run_with_policy_of(module):
    """Settings of a run without an environment, whose policy's config class is defined in that module."""
    config = type("OwnConfig", (), {"__module__": module})()
    return SimpleNamespace(policy=config, env=None)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("mine.policies.configuration_x", "mine.policies"),
        ("one_file", "one_file"),
        ("lerobot.policies.act.configuration_act", None),
        ("lerobot_policy_x.configuration_x", None),
    ],
)
def test_lerobot_eval_is_told_to_import_what_it_does_not_find_by_itself(module, package):
    assert eval_flags(run_with_policy_of(module)).get("discover_packages_path") == package


@pytest.mark.parametrize(("file", "package"), [("/somewhere/own_policy.py", "own_policy"), (None, None)])
def test_a_script_is_imported_by_the_name_of_its_file_and_a_notebook_not_at_all(monkeypatch, file, package):
    main = ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert eval_flags(run_with_policy_of("__main__")).get("discover_packages_path") == package
