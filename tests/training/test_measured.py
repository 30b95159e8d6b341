"""Sums of what the steps took."""

import math
from types import SimpleNamespace

import pytest

from lerobot_craft.training.recorder import Measured


def step(seconds, gpu_gib=None, loss=1.0):
    """lerobot's meters after a step."""
    metrics = {} if gpu_gib is None else {"gpu_mem_gb": None}
    meters = {"update_s": seconds, "gpu_mem_gb": gpu_gib, "loss": loss}
    return SimpleNamespace(**{name: SimpleNamespace(val=value) for name, value in meters.items()}, metrics=metrics)


def after(losses):
    measured = Measured()
    for loss in losses:
        measured.add(step(1.0, loss=loss), {})
    return measured.last_losses


def test_the_task_loss_of_the_last_two_quarters():
    assert after([9.0] * 20 + [2.0] * 10 + [0.5] * 10) == (2.0, 0.5)
    assert after([9.0] * 20 + [2.0] * 10 + [math.nan] + [0.5] * 10) == (2.0, 0.5)


def test_a_short_run_says_nothing_of_its_end():
    assert after([1.0] * 39) is None
    assert after([1.0] * 40) == (1.0, 1.0)


def test_anchors_are_charged_with_what_they_took():
    measured = Measured()
    measured.add(step(1.0), {"retention_loss": 0.1, "retention_s": 0.25})
    measured.add(step(0.5), {})
    timing = measured.timing(start_s=3.0)
    assert (timing.steps, timing.anchor_steps, timing.start_s) == (2, 1, 3.0)
    assert (timing.plain_s, timing.extra_s) == (1.25, 0.25)


def test_steps_at_the_bound_are_counted_among_those_with_anchors():
    measured = Measured()
    assert measured.bounded_share == 0
    for found in ({"retention_loss": 0.1, "bounded": True}, {"retention_loss": 0.1, "bounded": False}, {}):
        measured.add(step(1.0), found)
    assert measured.bounded_share == 0.5


def test_old_frames_are_charged_with_their_share_of_the_batch():
    measured = Measured()
    measured.add(step(2.0), {"replay_share": 0.25})
    assert measured.timing(0.0).extra_s == pytest.approx(0.5)


def test_peaks_of_the_gpu_are_kept_apart():
    measured = Measured()
    for gpu, found in ((1.0, {}), (3.0, {"retention_loss": 0.0}), (2.0, {})):
        measured.add(step(1.0, gpu), found)
    peak = measured.peak()
    assert (peak.gpu_plain, peak.gpu_anchors) == (2 * 2**30, 3 * 2**30)


def test_the_peak_of_this_process_is_that_of_the_system():
    from pathlib import Path

    if not (status := Path("/proc/self/status")).exists():
        pytest.skip("only Linux tells it in a file")
    high_water = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert Measured().peak().process == pytest.approx(int(high_water.split()[1]) * 1024, rel=0.05)
