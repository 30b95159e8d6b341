from dataclasses import replace
from pathlib import Path

import pytest

from lerobot_craft.doctor import Surroundings


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
