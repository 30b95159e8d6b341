"""The example of docs/adding-a-policy.md, taken from the page and run as the page says."""

import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import lerobot_craft
from tests.policies import test_invariants
from tests.policies.case import make_subject

ROOT = Path(lerobot_craft.__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-policy.md").read_text()
CONTRACT = ("policy_type", "output_kind", "reads_instruction", "train_mode", "fixed_names")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


def install(directory, entry_points):
    """A distribution as pip would leave it, as far as entry points go."""
    info = directory / "third_party-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    with (info / "entry_points.txt").open("w") as file:
        for group, names in entry_points.items():
            print(f"[{group}]", *(f"{name} = {target}" for name, target in names.items()), sep="\n", file=file)


def install_example(directory):
    (declared,) = blocks("toml")
    install(directory, tomllib.loads(declared)["project"]["entry-points"])
    adapter, cases = blocks("python")
    (directory / "reacher_craft.py").write_text(adapter)
    (directory / "reacher_cases.py").write_text(cases)
    (directory / "reacher.py").write_text((ROOT / "tests" / "policies" / "reacher.py").read_text())


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's policy, with the adapter that its entry point names."""
    package = tmp_path_factory.mktemp("example")
    install_example(package)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(package)
        (case,) = importlib.import_module("reacher_cases").CASES
        yield make_subject(case, package / "checkpoint")


INVARIANTS = {
    name: test
    for name, test in vars(test_invariants).items()
    if name.startswith("test_") and list(inspect.signature(test).parameters) == ["subject"]
}


def test_the_entry_point_leads_to_the_adapter(example):
    assert type(example.adapter).__module__ == "reacher_craft"


@pytest.mark.parametrize("invariant", INVARIANTS.values(), ids=INVARIANTS.keys())
def test_the_example_satisfies(example, invariant):
    example.policy.train()
    invariant(example)


def run_as_the_page_says(package):
    command = re.search(r"^CRAFT_POLICY_CASES=.*$", PAGE, flags=re.MULTILINE)[0].split()
    name, value = command[0].split("=")
    assert command[1] == "pytest"
    environment = {**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1", name: value}
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *command[2:]]
    return subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow  # another process that imports lerobot; test_the_example_satisfies is its short sibling
def test_the_command_of_the_page_runs_the_invariants(tmp_path):
    install_example(tmp_path)
    run = run_as_the_page_says(tmp_path)
    assert run.returncode == 0, run.stdout
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) >= len(INVARIANTS)


@pytest.mark.slow  # as above
def test_the_command_of_the_page_catches_a_wrong_adapter(tmp_path):
    install_example(tmp_path)
    file = tmp_path / "reacher_craft.py"
    file.write_text(file.read_text().replace('"state_proj", ', "").replace("policy.blocks[1:]", "policy.blocks"))
    run = run_as_the_page_says(tmp_path)
    assert run.returncode == 1
    assert "FAILED tests/policies/test_invariants.py::test_exactly_the_declared_parameters_get_gradient" in run.stdout
    assert "FAILED tests/policies/test_invariants.py::test_hidden_states_and_their_gradients" in run.stdout


def test_the_table_names_the_whole_contract():
    from lerobot_craft.policies import PolicyAdapter

    named = set(re.findall(r"^\| `(\w+)", PAGE, flags=re.MULTILINE))
    assert named == {*CONTRACT, *PolicyAdapter.__abstractmethods__}


def test_the_page_names_the_policies_that_are_known():
    from lerobot_craft.policies import supported_policies

    known = set(supported_policies()) - {"reacher"}  # the example may be installed by now
    assert known <= set(re.findall(r"`(\w+)`", PAGE.partition("## The contract")[0]))


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", PAGE))
def test_links_lead_somewhere(link):
    assert (ROOT / "docs" / link).exists()
