"""plugins/: stock lerobot finds the environment and the small policies, and commands for robots load nothing for it."""

import json
import os
import subprocess
import sys
import tomllib

import pytest

from tests.docs.pages import ROOT

PLUGINS = sorted(path.parent for path in (ROOT / "plugins").glob("*/pyproject.toml"))
# What lerobot's own commands do: import what they need, then the plugins.
ASK = """
import importlib, json, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
before = set(sys.modules)
from lerobot.utils.import_utils import register_third_party_plugins
register_third_party_plugins()
new = set(sys.modules) - before
known = []
if "lerobot.policies" in sys.modules:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.envs import EnvConfig
    known = [*PreTrainedConfig.get_known_choices(), *EnvConfig.get_known_choices()]
print(json.dumps({"known": known, "new": sorted(new)}))
"""


@pytest.fixture
def installed(tmp_path):
    """A directory as an installer leaves it: the module, and metadata with the name as pyproject.toml has it."""
    for plugin in PLUGINS:
        project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
        (module,) = plugin.glob("*.py")
        assert plugin.name == project["name"] == module.stem, "lerobot imports the name of the distribution"
        (tmp_path / module.name).write_text(module.read_text())
        info = tmp_path / f"{project['name']}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {project['version']}\n"
        )

    def ask(*modules):
        search = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-c", ASK, ",".join(modules)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return ask


@pytest.mark.slow  # a process that imports lerobot's policies
def test_stock_lerobot_finds_them_where_policies_and_environments_are_loaded(installed):
    found = installed("lerobot.scripts.lerobot_eval")
    assert {"craft_metaworld", "pi0_tiny", "pi05_tiny", "pi0_fast_tiny"} <= {*found["known"]}
    assert "mujoco" not in found["new"], "the simulator is loaded when an environment is made"


def test_where_they_are_not_nothing_is_loaded(installed):
    found = installed("lerobot.utils.import_utils")
    names = {plugin.name for plugin in PLUGINS}
    assert names <= {*found["new"]}
    assert not [name for name in found["new"] if name.startswith(("lerobot_craft", "lerobot.policies", "lerobot.envs"))]


def test_their_version_is_the_packages():
    from lerobot_craft import __version__

    for plugin in PLUGINS:
        assert tomllib.loads((plugin / "pyproject.toml").read_text())["project"]["version"] == __version__
