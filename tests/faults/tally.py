"""Counts of what was tried and what came of it: `make faults` writes them down, a normal run forgets them."""

import json
from pathlib import Path

import pytest


class Tally:
    """By fault: how often each outcome was seen. As a plugin it counts tests too, and writes all at the end."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[str, int]] = {}
        self.passed = self.skipped = 0

    def add(self, fault: str, outcome: str, times: int = 1) -> None:
        """Note that a fault of this kind ended so."""
        outcomes = self.counts.setdefault(fault, {})
        outcomes[outcome] = outcomes.get(outcome, 0) + times

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed += report.when == "call" and report.passed
        self.skipped += report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = session.config.getoption("--fault-counts")
        if path is not None:
            path.write_text(json.dumps(vars(self), indent=2) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fault-counts", type=Path, help="write what the tests of faults counted into this file")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tally(), "fault-tally")


@pytest.fixture(scope="session")
def tally(pytestconfig: pytest.Config) -> Tally:
    """Where a test notes what it tried."""
    return pytestconfig.pluginmanager.get_plugin("fault-tally")
