"""A save that is killed, at whatever moment, leaves the former checkpoint or the new one, whole."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.training.killed_saves import WAYS


@pytest.fixture(scope="module", params=WAYS)
def kills(request):
    """One save, killed before each of its operations in turn, and once not killed."""
    memory = Path("/dev/shm")  # noqa: S108  # a kill, unlike a power failure, is the same there, and ten times as fast
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "tests.training.killed_saves", scratch, request.param],
            capture_output=True,
            text=True,
            check=True,
        )
    return request.param, [json.loads(line) for line in done.stdout.splitlines()]


def test_a_save_that_is_killed_leaves_the_former_or_the_new_checkpoint_whole(kills):
    way, lines = kills
    former = {"fresh": None}.get(way, "old")
    assert [line["killed"] for line in lines] == [True] * (len(lines) - 1) + [False]
    ends = [cleared for line in lines for cleared in line["cleared"]]
    assert all(set(end) <= {"000010", "000020", "last", "newest"} for end in ends)
    assert all(end["000010"] == "early" for end in ends)
    assert all(end["last"] in ("early", former, "new") for end in ends)
    assert all(end["newest"] == end.get("000020", "early") for end in ends)
    assert {end.get("000020") for end in ends} == {former, "new"}
    assert len(ends) > len(lines) > 20
    assert lines[-1]["cleared"][-1]["last"] == "new"


def test_the_kills_met_every_state_in_between(kills):
    way, lines = kills
    seen = {name for line in lines for name in line["then"]}
    assert seen == {"000010", "000020", "last", ".000020.tmp", ".last.tmp"} | ({".000020.old"} & seen)
    assert (".000020.old" in seen) == (way == "rename")
    assert any(line["then"].get(".000020.tmp") == "torn" for line in lines)


def test_a_step_that_was_saved_before_is_there_at_every_moment(kills):
    way, lines = kills
    for then in (line["then"] for line in lines):
        if way == "exchange":
            assert then["000020"] in ("old", "new")
            assert then["last"] == then["000020"]
        if way == "rename":  # under its name, or waiting to be put back
            assert then.get("000020") in ("old", "new") or then[".000020.old"] == "old"
            assert then.get(".000020.old", "old") == "old"
