from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def beside_each_other(monkeypatch):
    """A script that Python is given finds those in its directory; one that a test runs must find them too."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
