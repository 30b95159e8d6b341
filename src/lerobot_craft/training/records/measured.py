"""What the steps of a run took: time with and without the method's own part, and the most memory that was in use."""

import math
import sys
from array import array
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from lerobot_craft.training.records.summary import Peak, Timing

_GIB = 2**30
_QUARTERS_OF = 10  # steps, at least, before two quarters of a run are compared


class Measured:
    """Sums over the steps of this process."""

    def __init__(self) -> None:
        self._steps = self._anchor_steps = self._bounded_steps = 0
        self._update_s = self._extra_s = 0.0
        self._gpu_peaks: dict[bool, int] = {}  # by whether the step had anchors
        self._losses = array("f")  # task loss of every step

    def add(self, tracker: Any, found: Mapping[str, Any]) -> None:
        """One step: lerobot's meters, and what the method measured.

        Old frames in the batch (`replay_share`) are charged with their share of the step's time.
        """
        seconds = tracker.update_s.val
        has_anchors = "retention_loss" in found
        self._steps += 1
        self._losses.append(tracker.loss.val)
        self._anchor_steps += has_anchors
        self._bounded_steps += found.get("bounded", False)
        self._update_s += seconds
        self._extra_s += found.get("retention_s", seconds * found.get("replay_share", 0.0))
        if "gpu_mem_gb" in tracker.metrics:  # lerobot resets the peak at each step
            peak = int(tracker.gpu_mem_gb.val * _GIB)
            self._gpu_peaks[has_anchors] = max(peak, self._gpu_peaks.get(has_anchors, 0))

    def timing(self, start_s: float) -> Timing:
        """Where the time went; `start_s` before the first step."""
        return Timing(self._steps, self._anchor_steps, self._update_s - self._extra_s, self._extra_s, start_s)

    @property
    def bounded_share(self) -> float:
        """Of the anchor steps those whose weighted retention gradient was shortened to its bound; 0 without any."""
        return self._bounded_steps / max(1, self._anchor_steps)

    @property
    def last_losses(self) -> tuple[float, float] | None:
        """Mean task loss of the third and of the last quarter of the steps; None for fewer than 40 finite ones."""
        losses = [loss for loss in self._losses if math.isfinite(loss)]
        quarter = len(losses) // 4
        if quarter < _QUARTERS_OF:
            return None
        return fmean(losses[-2 * quarter : -quarter]), fmean(losses[-quarter:])

    def peak(self) -> Peak:
        """The most memory that was in use until now."""
        return Peak(_peak_of_process(), self._gpu_peaks.get(False), self._gpu_peaks.get(True))


def _peak_of_process() -> int | None:
    """Bytes; None where the system does not tell."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
