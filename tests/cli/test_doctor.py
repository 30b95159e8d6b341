"""`craft doctor` as a person runs it: the whole command, in its own process."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import packaging
import pytest

import lerobot_craft
from lerobot_craft.doctor.check import INSTALL
from lerobot_craft.lerobot_api import supported_version

CRAFT = [sys.executable, "-m", "lerobot_craft"]
SRC = Path(lerobot_craft.__file__).parents[1]
# A signal may be ignored in whatever runs the tests, and a child inherits that.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from lerobot_craft.cli import main
sys.exit(main(["doctor"]))
"""


def test_json_tells_what_is_here():
    doctor = subprocess.run([*CRAFT, "doctor", "--json"], capture_output=True, text=True, check=False)
    assert doctor.stderr == ""
    report = json.loads(doctor.stdout)
    checks = {check["name"]: check for check in report["checks"]}
    # The test environment is a full one, so these hold on every machine that runs the tests.
    assert doctor.returncode == 0
    assert report["ready"] is True
    for name in ("python", "craft", "lerobot", "torch", "pyav"):
        assert checks[name]["status"] == "ok", checks[name]
    assert supported_version() in checks["lerobot"]["value"]
    assert {"devices", "threads", "rendering", "torchcodec", "disk", "memory", "hub", "pi"} <= set(checks)
    for check in report["checks"]:
        assert set(check) == {"name", "status", "value", "remedy"}
        assert "\n" not in check["value"]
        assert check["remedy"] or check["status"] in ("ok", "note"), f"{check} does not say what to type"


@pytest.mark.parametrize("besides", ["nothing", "packaging"])
def test_on_a_bare_python_it_says_what_is_missing_instead_of_crashing(tmp_path, besides):
    venv.create(tmp_path / "bare", with_pip=False)
    python = tmp_path / "bare" / "bin" / "python"
    if besides == "packaging":  # requirements could be read, but craft is not installed
        (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(tmp_path)])}
    doctor = subprocess.run(
        [python, "-m", "lerobot_craft", "doctor"], env=env, capture_output=True, text=True, check=False
    )
    assert doctor.stderr == ""
    assert doctor.returncode == 1
    lines = [line.split() for line in doctor.stdout.splitlines() if line.strip()]
    missing = [words[1] for words in lines if words[0] == "missing"]
    assert missing == ["craft", "lerobot", "requirements", "torch", "pyav"]
    assert doctor.stdout.count(f"-> {INSTALL}\n") >= len(missing)
    assert "pi" not in [words[1] for words in lines], "an extra was judged without its requirements"
    assert lines[-1][:2] == ["Not", "ready:"]


@pytest.mark.parametrize(("action", "exit_code"), [("interrupt", 130), ("stop reading", 141)])
def test_it_ends_quietly_when_it_is_stopped_half_way(action, exit_code):
    command = [sys.executable, "-c", INTERRUPTIBLE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as doctor:
        assert doctor.stdout.readline().startswith("ok       python")
        if action == "interrupt":
            doctor.send_signal(2)
        else:
            doctor.stdout.close()
        assert doctor.stderr.read() == ""
        assert doctor.wait(timeout=60) == exit_code


def test_its_options_are_its_own(capsys):
    from lerobot_craft.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--jsom"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: craft doctor")
