"""The command itself: finding the verb, handing over its arguments, and ending well when things go wrong."""

import importlib.metadata
import os
import subprocess
import sys

import pytest

from lerobot_craft import __version__
from lerobot_craft.cli import VERBS, Verb, main
from lerobot_craft.errors import CraftError

CRAFT = [sys.executable, "-m", "lerobot_craft"]


@pytest.fixture
def verb(tmp_path, monkeypatch):
    """Adds a verb `echo` with the given body, as a new verb would be added: one line and one file."""

    def add(body: str) -> None:
        (tmp_path / "echo_verb.py").write_text(f"def run(argv):\n    {body}\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "echo_verb", raising=False)
        monkeypatch.setitem(VERBS, "echo", Verb("echo_verb", "for the tests"))

    return add


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--version"]])
def test_help_and_version_load_nothing_heavy(argv):
    code = f"""
import sys
from lerobot_craft.cli import main
assert main({argv!r}) == 0
heavy = {{"torch", "numpy", "lerobot", "draccus", "lerobot_craft.cli.doctor"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_help_names_every_verb(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, verb in VERBS.items():
        assert f"{name} {verb.summary}" in " ".join(out.split())


def test_a_line_without_a_verb_shows_the_help_and_fails(capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("usage: craft VERB")


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"craft {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["docter"], "unknown verb 'docter': did you mean `craft doctor`?"),
        (["zzz"], "unknown verb 'zzz': `craft --help` lists what there is."),
        (["--verson"], "unknown option '--verson': did you mean `craft --version`?"),
        (["--hp"], "unknown option '--hp': did you mean `craft --help`?"),
        (["--json", "doctor"], "unknown option '--json': `craft --help` lists what there is."),
    ],
)
def test_an_unknown_verb_is_one_sentence(argv, sentence, capsys):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"craft: {sentence}\n")


def test_a_verb_receives_its_arguments_untouched(verb, capsys):
    verb("print(argv); return 7")
    rest = ["--help", "-h", "--policy.type=act", "--version", "--", "doctor"]
    assert main(["echo", *rest]) == 7
    assert capsys.readouterr().out == f"{rest}\n"


def test_an_error_for_a_person_is_a_sentence(verb, capsys):
    verb("from lerobot_craft.errors import CraftError; raise CraftError('no cache here: run `craft cache`')")
    assert main(["echo"]) == 2
    assert capsys.readouterr().err == "craft: no cache here: run `craft cache`\n"


def test_an_unexpected_error_keeps_its_traceback(verb):
    verb("raise ZeroDivisionError('a fault of ours')")
    with pytest.raises(ZeroDivisionError):
        main(["echo"])


def test_an_interrupted_verb_ends_like_an_interrupted_program(verb, capsys):
    verb("raise KeyboardInterrupt")
    assert main(["echo"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_left_is_no_fault(unbuffered):
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    craft = subprocess.run([*CRAFT, "--help"], env=env, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (craft.returncode, craft.stderr) == (141, b"")


def test_another_broken_pipe_is_a_fault():
    # Standard output is whole, so this error came from elsewhere and must not be swallowed.
    code = """
import sys
from lerobot_craft import cli
def run(argv):
    raise BrokenPipeError("a data worker died")
cli.VERBS["echo"] = cli.Verb("__main__", "for the test")
cli.main(["echo"])
"""
    craft = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert craft.returncode == 1
    assert "BrokenPipeError: a data worker died" in craft.stderr


def test_the_installed_command_is_this_one():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="craft")
    assert script.load() is main


def test_python_dash_m_is_the_same_command():
    craft = subprocess.run([*CRAFT, "--version"], capture_output=True, text=True, check=True)
    assert craft.stdout == f"craft {__version__}\n"


def test_the_error_base_is_free_of_the_command():
    # core raises it too, and core must not pull the command in.
    code = "import sys, lerobot_craft.errors; assert not [m for m in sys.modules if 'lerobot_craft.cli' in m]"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert issubclass(CraftError, Exception)


def test_every_verb_runs_with_lerobots_video_noise_cut(verb, capsys):
    verb("import logging; print(len(logging.getLogger('lerobot.utils.import_utils').filters)); return 0")
    assert main(["echo"]) == 0
    assert capsys.readouterr().out == "1\n"
