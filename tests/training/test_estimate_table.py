import json

import pytest

from lerobot_craft.training.dry_step import ANCHOR_PASS, OPTIMIZER_STEP, REST, TASK_PASS, Peak, Sizes
from lerobot_craft.training.estimate import as_json, as_text, make_estimate, verdict

GIB = 2**30
PARTS = {"weights": 2 * GIB, "optimizer": 4 * GIB, "gradients": 2 * GIB, "retention": 2 * GIB, "batch": GIB}


def estimate(peaks, unknown=(), constant=None, share=1.0, host=None):
    held = {"weights": round(2 * GIB * share), "batch": GIB}
    found = {phase: Peak({**held, **parts}) for phase, parts in peaks.items()}
    sizes = Sizes(PARTS, found, dict.fromkeys(unknown, "it is"), {})
    return make_estimate("run", sizes, constant or {}, share, host or {}, [])


def rows(found):
    return {row.name: (row.whole, row.at_peak) for row in found.rows}


def test_the_total_is_the_larger_phase_with_what_is_held_all_along():
    found = estimate(
        {TASK_PASS: {REST: 5 * GIB}, ANCHOR_PASS: {"gradients": 2 * GIB, REST: 4 * GIB}, OPTIMIZER_STEP: {REST: GIB}},
        constant={"copy": 3 * GIB},
    )
    assert found.phases == {TASK_PASS: 11 * GIB, ANCHOR_PASS: 12 * GIB, OPTIMIZER_STEP: 7 * GIB}
    assert (found.peak_phase, found.total) == (ANCHOR_PASS, 12 * GIB)
    assert rows(found)["activations, task pass"] == (5 * GIB, 0)
    assert rows(found)["activations, anchor pass"] == (4 * GIB, 4 * GIB)
    assert rows(found)["retention gradient"] == (2 * GIB, 0)
    assert sum(row.at_peak for row in found.rows) == found.total


def test_shares_are_of_what_is_divided():
    found = estimate({TASK_PASS: {REST: GIB}}, share=0.5)
    assert rows(found)["weights"] == (GIB, GIB)
    assert rows(found)["batches"] == (GIB, GIB)


def test_what_is_not_known_is_not_summed_up():
    found = estimate({OPTIMIZER_STEP: {REST: GIB}}, unknown=[TASK_PASS])
    assert rows(found)["activations, task pass"] == (None, None)
    assert found.total == sum(PARTS.values())
    text = as_text(found, on_cpu=False)
    assert "unknown" in text
    assert "no card is named" in text
    assert json.loads(as_json(found))["total_bytes"] is None


def test_what_is_known_of_a_shared_run_is_a_devices_share():
    found = estimate({}, unknown=[TASK_PASS], share=0.5)
    assert found.total == 5 * GIB + GIB  # half of what is divided, and the batch


@pytest.mark.parametrize(("activations", "card"), [(1, "a card of 8 GB"), (18, "a card of 24 GB"), (19, "of 32 GB")])
def test_the_card_leaves_room_for_what_is_no_tensor(activations, card):
    found = estimate({TASK_PASS: {REST: round(activations * GIB) - 2 * GIB // 2}})
    assert card in verdict(found, on_cpu=False)


def test_no_card_is_large_enough():
    found = estimate({TASK_PASS: {REST: 500 * GIB}})
    assert "no card of 180 GB or less" in verdict(found, on_cpu=False)


def test_host_memory_stands_apart():
    found = estimate({TASK_PASS: {REST: GIB}}, host={"frames": 3 * GIB})
    assert found.total == 4 * GIB
    assert "3.00 GiB" in as_text(found, on_cpu=True)
