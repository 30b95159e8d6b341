import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lerobot_craft.doctor import Check, Status, Surroundings, as_json, as_lines, is_ready, verdict, wants_colour

FINE = Check("torch", Status.OK, "2.11.0")
ODD = Check("rendering", Status.WARN, "egl works", "export MUJOCO_GL=egl")
GONE = Check("lerobot", Status.MISSING, "not installed", "pip install .")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_problem_is_followed_by_the_command_that_fixes_it():
    first, second = as_lines(ODD).splitlines()
    assert first == "warn     rendering     egl works"
    assert second.strip() == "-> export MUJOCO_GL=egl"


def test_values_stand_in_one_column():
    assert {line.index(c.value) for c in (FINE, ODD, GONE) for line in [as_lines(c).splitlines()[0]]} == {23}


def test_colour_changes_nothing_but_the_mark():
    assert as_lines(FINE, colour=True).replace("\033[32m", "").replace("\033[0m", "") == as_lines(FINE)


@pytest.mark.parametrize(
    ("env", "stream", "expected"),
    [
        ({}, Terminal(), True),
        ({"NO_COLOR": ""}, Terminal(), True),  # the convention: only a non-empty value declines
        ({"NO_COLOR": "1"}, Terminal(), False),
        ({"TERM": "dumb"}, Terminal(), False),
        ({}, io.StringIO(), False),
    ],
)
def test_colour_only_where_a_person_looks(env, stream, expected):
    assert wants_colour(env, stream) is expected


@pytest.mark.parametrize(
    ("checks", "sentence"),
    [
        ([FINE], "Ready: everything craft needs is here."),
        ([FINE, ODD], "Ready: everything craft needs is here (1 warning)."),
        ([ODD, ODD], "Ready: everything craft needs is here (2 warnings)."),
        ([GONE, ODD], "Not ready: lerobot must be fixed first (1 warning)."),
    ],
)
def test_verdict(checks, sentence):
    assert verdict(checks) == sentence
    assert is_ready(checks) is sentence.startswith("Ready")


def test_json_holds_the_same_findings():
    report = json.loads(as_json([FINE, GONE]))
    assert report["ready"] is False
    assert report["checks"] == [
        {"name": "torch", "status": "ok", "value": "2.11.0", "remedy": None},
        {"name": "lerobot", "status": "missing", "value": "not installed", "remedy": "pip install ."},
    ]


def test_observe_sees_this_process(monkeypatch):
    monkeypatch.setenv("CRAFT_TEST_MARK", "seen")
    here = Surroundings.observe()
    assert here.env["CRAFT_TEST_MARK"] == "seen"
    assert here.here == Path.cwd()


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "apt-get update && apt-get install -y ffmpeg"),
        ({"is_root": False}, "sudo apt-get update && sudo apt-get install -y ffmpeg"),
        ({"tools": frozenset(), "system": "Darwin"}, "brew install ffmpeg"),
        ({"tools": frozenset()}, "install ffmpeg with this system's package manager"),
    ],
)
def test_the_install_line_fits_the_system(surroundings, changes, line):
    assert replace(surroundings, **changes).install_line(apt="ffmpeg", elsewhere="ffmpeg") == line


@pytest.mark.parametrize(
    ("path", "shown"), [("/home/someone/.cache", "~/.cache"), ("/home/someone", "~"), ("/data", "/data")]
)
def test_a_report_does_not_tell_the_users_name(surroundings, path, shown):
    assert surroundings.shorten(Path(path)) == shown
