"""Checkpoints beyond `--save_freq`: after some minutes, and when a person or a scheduler ends the run."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

import torch

from lerobot_craft.core.ranks import sum_over_ranks

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_NOTED = b"\ncraft: the step is finished and saved first; Ctrl-C (again) ends the run at once\n"


class Interruption:
    """Whether to save, and whether to stop, after a step: the same answer on all ranks.

    As a context it gives the signals back at its end. A SIGTERM may come more than once (from a scheduler, and again
    from the launcher that it reached too); a second Ctrl-C is a person's.

    Args:
        active: Else nothing is ever due, and signals do what they did.
        save_minutes: Between two checkpoints; 0: the clock asks for none.
        main: Whether this is the main rank, whose clock counts.
    """

    def __init__(self, *, active: bool, save_minutes: float, main: bool) -> None:
        self._active = active
        self._save_s = 60 * save_minutes
        self._main = main
        self._saved_at = time.monotonic()
        self._former: dict[int, Any] = {}
        self._cut_short = False
        self.signal = 0  # that reached this rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def listen(self) -> None:
        """Take SIGINT and SIGTERM from here on: once there is a step to save. One that is ignored stays ignored."""
        if not self._active or self._former or threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._former[number] = signal.signal(number, self._note)

    def _note(self, number: int, _: FrameType | None) -> None:
        if signal.SIGINT in self._former:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.signal:
            return
        self.signal = number
        if self._main:
            os.write(2, _NOTED)  # not print: the signal may have come in the middle of one
        if self._cut_short:
            raise KeyboardInterrupt

    def run_unless_stopped(self, work: Any) -> None:
        """Call `work`, which no later step depends on; a signal ends it, or keeps it from starting."""
        try:
            self._cut_short = True
            if not self.signal:
                work()
        except KeyboardInterrupt:
            if not self.signal:
                raise
        finally:
            self._cut_short = False

    def saved(self) -> None:
        """A checkpoint was written just now."""
        self._saved_at = time.monotonic()

    def decide(self) -> tuple[bool, int]:
        """Whether a checkpoint is due, and the signal that ends the run (0: none); a collective."""
        if not self._active:
            return False, 0
        late = self._main and 0 < self._save_s <= time.monotonic() - self._saved_at
        found = sum_over_ranks(torch.tensor([late, *(self.signal == number for number in _SIGNALS)], dtype=torch.int64))
        due, *signals = found.tolist()
        stop = next((int(number) for number, ranks in zip(_SIGNALS, signals, strict=True) if ranks), 0)
        return bool(due or stop), stop
