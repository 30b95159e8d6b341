"""docs/quickstart.md, typed as it stands; at a small size, because only the order of things is asked for here."""

import ast
import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.docs.pages import ROOT, fences, section

PAGE = (ROOT / "docs" / "quickstart.md").read_text()
# What the page says, and what is said here in its place. Each must be there.
SMALLER = {
    "episodes=25,": "episodes=2,",
    "episodes=20,": "episodes=2,",
    "--steps=1000": "--steps=4",
    "--steps=250": "--steps=4",
    "--batch_size=64": "--batch_size=4",
    "warmup_steps=100": "warmup_steps=1",
    "warmup_steps=50": "warmup_steps=1",
    "--craft.old_instructions=": "--craft.num_anchors=12 --craft.old_instructions=",
    "--eval.n_episodes=20": "--eval.n_episodes=1",
}


def typed():
    """The blocks that run, one after the other."""
    return "\n".join(code for language, code in fences(PAGE) if language == "sh")


def python_in(script):
    (code,) = re.findall(r"<<'PY'\n(.*?)^PY$", script, re.MULTILINE | re.DOTALL)
    return code


def test_its_python_calls_what_there_is():
    """The quick part of the slow test below: names can be imported, and are called with arguments that they take."""
    tree = ast.parse(python_in(typed()))
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            known |= {alias.name: getattr(importlib.import_module(node.module), alias.name) for alias in node.names}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.func.id in known]
    assert {"record", "make_start", "policy_named"} <= {call.func.id for call in calls}
    for call in calls:
        inspect.signature(known[call.func.id]).bind(*call.args, **{key.arg: key.value for key in call.keywords})


def test_the_instructions_are_those_of_the_simulator():
    from lerobot_craft.bench.metaworld.tasks import find_task

    code = python_in(typed())
    (listed,) = re.findall(r"^INSTRUCTIONS = (\[.*?\])$", code, re.MULTILINE)
    tasks = [task for names in re.findall(r"record\(.*?(\[.*?\])", code) for task in ast.literal_eval(names)]
    assert ast.literal_eval(listed) == [find_task(task).instruction for task in tasks]
    kept = set(re.findall(r'--craft\.old_instructions="(rotate.*?)"', PAGE))
    assert kept == {"; ".join(ast.literal_eval(listed)[:-1])}


def test_small_stays_in_step_with_the_page():
    assert [text for text in SMALLER if text not in typed()] == []
    assert "```sh" not in section(PAGE, "Your own policy and datasets")  # checked for their flags, never run


@pytest.mark.slow  # two recordings, three trainings and an evaluation, each in a process that imports lerobot
@pytest.mark.timeout(1800)
def test_a_stranger_gets_to_an_evaluated_policy(tmp_path):
    from lerobot_craft.evaluation.matrix import read_evaluation

    script = typed()
    for said, small in SMALLER.items():
        script = script.replace(said, small)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"craft": "-m lerobot_craft", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        (tools / name).chmod(0o755)
    place = tmp_path / "anywhere"
    place.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "CRAFT_HOME": str(tmp_path / "home"),
        "OMP_NUM_THREADS": "1",
    }
    command = [shutil.which("bash"), "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    found = read_evaluation(place / "outputs" / "eval" / "evaluation.json")
    assert [row.name for row in found.rows] == ["before", "plain", "kept"]
    for row in found.rows:
        assert {task: len(played) for task, played in row.successes.items()} == {
            "faucet-open": 1,
            "handle-press": 1,
            "faucet-close": 1,
        }
    assert (place / "outputs" / "eval" / "report.html").is_file()
    assert list((tmp_path / "home" / "anchors").glob("*/manifest.json"))
    assert (place / "outputs" / "kept" / "lambda_history.csv").is_file()
    assert not (place / "outputs" / "plain" / "lambda_history.csv").exists()
