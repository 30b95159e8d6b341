import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "overhead.py"


@pytest.fixture
def overhead():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def found(overhead):
    """Limits of rows whose numbers are round, by what they say."""

    def row(name, k, time, operations, peak, beyond, gradient):
        return overhead["Measured"](name, k, time, operations, peak, beyond, {"retention_gradient_bytes": gradient})

    rows = [
        row("plain", 1, 1.0, 1.0, 30_000_000, 0, 0),
        row("hidden, layer -2", 1, 1.5, 1.5, 30_000_000, 5_000_000, 8_000_000),
        row("hidden, layer -2", 5, 1.1, 1.1, 30_000_000, 0, 8_000_000),
        row("token_ce", 1, 2.2, 2.0, 60_000_000, 31_000_000, 10_000_000),
        row("token_ce", 5, 1.2, 1.2, 60_000_000, 31_000_000, 10_000_000),
        row("plain LoRA", 1, 1.0, 1.0, 30_000_000, 0, 0),
        row("LoRA, hidden, layer -2", 1, 1.5, 1.5, 31_000_000, 1_000_000, 100_000),
        row("LoRA, hidden, online", 1, 1.5, 1.5, 99_000_000, 69_000_000, 100_000),
    ]
    limits = overhead["limits"](rows, {"later": 0.01, "first visit": 0.03}, 10_000_000, "plain", "plain LoRA")
    return {limit.what: limit for limit in limits}


def test_time_is_held_against_arithmetic(found):
    assert found["hidden, layer -2, K=1: time against arithmetic"].holds
    over = found["token_ce, K=1: time against arithmetic"]
    assert over.measured == pytest.approx(1.1)
    assert not over.holds
    assert found["hidden, layer -2, K=5: time against plain"].holds
    assert not found["token_ce, K=5: time against plain"].holds


def test_memory_may_grow_by_a_gradient_and_the_anchors_activations(found):
    limit = "peak beyond plain (limit: one gradient and the anchors' activations)"
    assert found[f"token_ce: {limit}"].limit == 10 + (30 - 10)
    assert not found[f"token_ce: {limit}"].holds
    assert found[f"hidden, layer -2: {limit}"].holds
    lora = found["LoRA, hidden, layer -2: peak beyond plain LoRA"]
    assert lora.measured == pytest.approx(100 * 1 / (10 + 30))
    assert not lora.holds
    assert not any("online" in what for what in found)


def test_what_should_be_large_is_held_from_below(found):
    cheaper = found["the pass to layer -2 is cheaper than the whole one, by arithmetic"]
    assert cheaper.measured == pytest.approx(2.0)
    assert cheaper.holds
    assert "≥ 1.50x | yes" in cheaper.markdown()


def test_data_take_a_share_of_the_step(found, overhead):
    assert found["anchors' data, later: share of a step"].holds
    assert not found["anchors' data, first visit: share of a step"].holds
    table = overhead["overhead_table"](list(found.values()))
    assert table.count("\n") == 1 + len(found)
    assert "| anchors' data, first visit: share of a step | 3.00 % | ≤ 2.00 % | no |" in table
