"""The set-up script on machines that lack something: a PATH with only the tools that the case allows."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "cat", "cksum", "dirname", "env", "rm")


@pytest.fixture
def machine(tmp_path):
    """A copy of what the script reads, and an empty machine to run it on."""
    project, path = tmp_path / "project", tmp_path / "bin"
    (project / "scripts").mkdir(parents=True)
    path.mkdir()
    shutil.copy(ROOT / "scripts" / "bootstrap", project / "scripts")
    for name in ("requirements.lock", "pyproject.toml", ".python-version"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "plugins", project / "plugins")
    for tool in TOOLS:
        (path / tool).symlink_to(shutil.which(tool))

    def run(**programs):
        for name, body in programs.items():
            program = path / name.replace("_", ".")
            program.write_text(f"#!{shutil.which('bash')}\n{body}\n")
            program.chmod(0o755)
        command = [str(project / "scripts" / "bootstrap")]
        return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, timeout=60)

    run.project = project
    return run


def test_no_python_is_one_sentence_that_says_what_to_install(machine):
    result = machine()
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "needs Python 3.12 or newer and found none" in result.stderr
    assert "apt install python3.12" in result.stderr


def test_shims_that_exist_but_do_not_run_are_not_taken(machine):
    shim = "echo 'pyenv: command not found' >&2; exit 127"
    result = machine(uv=shim, python3_12=shim, python3=shim)
    assert result.returncode == 1
    assert "found none" in result.stderr


def test_python_without_venv_says_what_to_install(machine):
    result = machine(python3_12='[ "$1" = -c ] && exit 0; echo "No module named venv" >&2; exit 1')
    assert result.returncode == 1
    assert "cannot make a virtual environment" in result.stderr
    assert "python3-venv" in result.stderr


FAKE_UV = """
case "$*" in
  venv*) /bin/mkdir -p .venv/bin; echo "#!/bin/sh" > .venv/bin/python; /bin/chmod +x .venv/bin/python ;;
  *requirements.lock*) exit {install} ;;
esac
"""


def test_uv_that_runs_is_used_and_an_interrupted_install_is_not_taken_for_whole(machine):
    assert machine(uv=FAKE_UV.format(install=3)).returncode == 3
    assert not (machine.project / ".venv" / ".bootstrapped").exists()
    result = machine(uv=FAKE_UV.format(install=0))
    assert result.returncode == 0
    assert "ready after" in result.stderr
    again = machine(uv="exit 99")  # nothing is called any more
    assert (again.returncode, again.stderr) == (0, "")
    (machine.project / "requirements.lock").write_text("changed\n")
    assert machine(uv=FAKE_UV.format(install=3)).returncode == 3


def test_it_installs_every_plugin():
    script = (ROOT / "scripts" / "bootstrap").read_text()
    plugins = sorted(path.name for path in (ROOT / "plugins").iterdir() if (path / "pyproject.toml").is_file())
    assert plugins
    assert [name for name in plugins if f"--editable plugins/{name}" not in script] == []


def test_the_lock_names_no_host_and_the_pinned_engine():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    assert "\nlerobot==0.6.1\n" in lock
    assert os.access(ROOT / "scripts" / "bootstrap", os.X_OK)
