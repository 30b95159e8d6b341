"""How long a part of a step takes, on devices that work while Python goes on."""

import time
from typing import Any

import torch


class Stopwatch:
    """Measures one part of a step; `seconds` is None until `stop` follows `start`.

    On a GPU both wait for the device: or the part would be charged for what was launched before it, and not for itself.
    """

    def __init__(self, device: torch.device | Any) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: float | None = None
        self.seconds: float | None = None

    def start(self) -> None:
        """Begin; what was measured before is forgotten."""
        self.seconds, self._began = None, self._now()

    def stop(self) -> None:
        """End; without `start` there is nothing to measure."""
        if self._began is not None:
            self.seconds, self._began = self._now() - self._began, None

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds = self._began = None

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()
