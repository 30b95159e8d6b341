"""A small bench, made of the suite's quickest scenario."""

import pytest


@pytest.fixture
def bench_settings(tmp_path):
    """Function from changes to the settings of a small bench."""
    from lerobot_craft.bench.settings import BenchSettings

    def make(**changes):
        small = {"scenarios": ("reach",), "methods": ("naive", "craft"), "anchors": (0,), "seeds": (0,), "episodes": 2}
        return BenchSettings(tmp_path / "bench", **(small | changes))

    return make


@pytest.fixture
def two_stages(monkeypatch):
    """Name of a scenario with two new tasks, one after the other."""
    from lerobot_craft.bench.scenarios import SCENARIOS, Scenario

    scenario = Scenario("two-stages", "tuning", old=("reach-red",), new=("button-topdown", "reach-blue"))
    monkeypatch.setitem(SCENARIOS, scenario.name, scenario)
    return scenario.name
