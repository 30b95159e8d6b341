"""Nobody is called: a cache is built and a policy trained without a try to reach another machine."""

import socket
import subprocess
import sys

import pytest

from tests.anchors.test_interrupted import command
from tests.warm_process import environment

NO_INTERNET = "tests.faults.injected:no_internet"
PROGRAM = """
import sys
from tests.faults.injected import no_internet
from lerobot_craft.cli import main
no_internet(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def commands(anchor_data, checkpoints, train_flags, tmp_path):
    """Build a cache, then train with it."""
    cache = tmp_path / "cache"
    own = ["--craft.enabled=true", "--craft.retention_mode=action", f"--craft.anchor_cache_dir={cache}"]
    return [
        command(anchor_data, checkpoints("smolvla"), cache),
        ["train", *train_flags("smolvla", tmp_path / "run", steps=1), *own],
    ]


@pytest.mark.slow  # two runs; its short form is below
def test_building_and_training_call_nobody(commands, warm_process, tmp_path, tally):
    tries = tmp_path / "tries"
    for argv in commands:
        log = tmp_path / f"log_{argv[0]}"
        assert warm_process.run(argv, log, prepare=(NO_INTERNET, str(tries))) == 0, log.read_text()[-3000:]
        tally.add("sockets closed", "worked, and nobody was called")
    assert not tries.exists(), tries.read_text()


def test_a_run_calls_nobody(build, train_flags, craft_train, monkeypatch, tmp_path):
    called = []

    class NoInternet(socket.socket):
        def __init__(self, family=-1, *arguments, **options):
            if family in (-1, socket.AF_INET, socket.AF_INET6):
                called.append(family)
                raise OSError("there is no internet here")
            super().__init__(family, *arguments, **options)

    monkeypatch.setattr(socket, "socket", NoInternet)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    cache = build("act", retention_mode="action")
    own = ["--craft.enabled=true", "--craft.retention_mode=action", f"--craft.anchor_cache_dir={cache}"]
    assert craft_train(*train_flags("act", tmp_path / "run", steps=1), *own) == 0
    assert called == []


@pytest.mark.slow  # a run
def test_a_call_would_be_noticed(warm_process, checkpoints, train_flags, tmp_path):
    tries = tmp_path / "tries"
    argv = ["train", *train_flags("act", tmp_path / "run", policy__path="somebody/policy"), "--craft.enabled=true"]
    assert warm_process.run(argv, tmp_path / "log", prepare=(NO_INTERNET, str(tries))) == 2
    assert "somebody/policy" in (tmp_path / "log").read_text().splitlines()[-1]
    assert "socket" in tries.read_text()


@pytest.mark.slow  # two processes that import lerobot, from the start without HF_HUB_OFFLINE
@pytest.mark.timeout(600)
def test_imports_call_nobody_either(commands, tmp_path, tally):
    tries = tmp_path / "tries"
    variables = {name: value for name, value in environment().items() if name != "HF_HUB_OFFLINE"}
    for argv in commands:
        line = [sys.executable, "-c", PROGRAM, str(tries), *argv]
        done = subprocess.run(line, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        tally.add("sockets closed", "worked, and nobody was called")
    assert not tries.exists(), tries.read_text()
