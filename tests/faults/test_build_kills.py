"""`craft cache build`, killed or out of room, and started again by the same line: the same cache, byte for byte."""

import random
import signal

import pytest

from tests.anchors.test_build import contents
from tests.anchors.test_interrupted import command

TRIALS = 20
KILL = "tests.faults.injected:kill_before_operation"


class Builds:
    """Builds of one cache, in directories of their own."""

    def __init__(self, anchor_data, checkpoint, warm_process, tmp_path):
        self._data, self._checkpoint, self._warm, self._tmp = anchor_data, checkpoint, warm_process, tmp_path
        report = tmp_path / "operations"
        prepare = ("tests.faults.injected:count_operations", str(tmp_path / "whole"), str(report))
        assert self.run("whole", prepare=prepare) == 0, self.said("whole")
        self.whole, self.operations = contents(tmp_path / "whole"), int(report.read_text())

    def run(self, name, **options):
        argv = command(self._data, self._checkpoint, self._tmp / name)
        return self._warm.run(argv, self._tmp / f"{name}.log", **options)

    def said(self, name):
        return (self._tmp / f"{name}.log").read_text()

    def killed_at(self, place):
        """Kill before an operation, start again, and compare."""
        name = f"killed_{place}"
        assert self.run(name, prepare=(KILL, str(self._tmp / name), place)) == -signal.SIGKILL, self.said(name)
        assert self.run(name) == 0, self.said(name)
        assert contents(self._tmp / name) == self.whole


@pytest.fixture
def builds(anchor_data, checkpoints, warm_process, tmp_path):
    return Builds(anchor_data, checkpoints("smolvla"), warm_process, tmp_path)


@pytest.mark.slow  # five builds; the short form is tests/anchors/test_interrupted.py
@pytest.mark.timeout(600)
def test_a_build_that_is_killed_or_out_of_room_goes_on_when_started_again(builds):
    builds.killed_at(builds.operations - 4)  # before the manifest gets its name: all shards are there
    assert builds.run("limited", largest_file=3000) == 2
    assert "craft: " in builds.said("limited").splitlines()[-1]
    assert "`ulimit -f`" in builds.said("limited").splitlines()[-1]
    assert "Traceback" not in builds.said("limited")
    assert builds.run("limited") == 0
    assert contents(builds._tmp / "limited") == builds.whole


@pytest.mark.slow  # two builds for each kill
@pytest.mark.timeout(1200)
def test_a_build_that_is_killed_anywhere_goes_on_when_started_again(builds, tally):
    places = sorted(random.Random(0).sample(range(builds.operations), TRIALS))  # noqa: S311  # the same each time
    for place in places:
        builds.killed_at(place)
        tally.add("SIGKILL of craft cache build", "started again: same bytes")
