"""A checkpoint of lerobot's own form, with CRaFT's settings and state beside it; whole or not at all.

Checkpoints beyond `--save_freq`: after some minutes, and when a person or a scheduler ends the run.
"""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import torch

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.core.ranks import sum_over_ranks
from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.lerobot_api.train_parts import checkpoint_directory
from lerobot_craft.lerobot_api.train_steps import gather_streams, save_streams
from lerobot_craft.training.card_sections import CARD_FILE
from lerobot_craft.training.checkpoints import (
    PASSING,
    point_last_at,
    remove_passing,
    save_craft_state,
    whole_or_not_at_all,
)
from lerobot_craft.training.run_memory import link_files
from lerobot_craft.training.run_settings import save_craft_config
from lerobot_craft.training.session import Origin, Session
from lerobot_craft.training.weights import gather_masters, gather_states, save_masters

if TYPE_CHECKING:
    from lerobot_craft.training.recorder import Recorder


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


logger = logging.getLogger(__name__)

_PRETRAINED = "pretrained_model"


def save(session: Session, recorder: "Recorder", *, passing: bool = False) -> None:
    """Write the checkpoint of the present step; all ranks call this, the main one writes.

    Args:
        session: Of the run.
        recorder: Of the run.
        passing: It is for resuming only: it is not uploaded, and the next checkpoint replaces it.
    """
    main = session.accelerator.is_main_process
    streams = gather_streams() if session.craft.enabled else []
    gathered = gather_states(session.student, session.optimizer, keep=main) if session.craft.shard else None
    copies = gather_masters(session.masters, keep=main)
    if main:
        # First, so that no row of a step that the checkpoint has passed can be lost.
        recorder.flush()
        directory = checkpoint_directory(session.cfg, session.step)
        logger.info("Checkpoint policy after step %d", session.step)
        with whole_or_not_at_all(directory) as partial:
            _write(session, partial, gathered)
            save_streams(partial, streams)
            save_masters(partial, copies)
            if session.origin is not None:
                save_craft_config(session.craft, partial / _PRETRAINED)
                (partial / _PRETRAINED / CARD_FILE).write_text(recorder.card(session), encoding="utf-8")
                if session.carried is not None:
                    link_files(session.carried.directory, partial / _PRETRAINED / MEMORY_FOLDER)
                save_craft_state(partial, _state(session, session.origin, passing))
        point_last_at(directory)
        remove_passing(directory)
        if session.cfg.save_checkpoint_to_hub and not passing:
            if session.carried is not None:
                travels = "; ".join(session.carried.lines())
                logger.info("the push of %s takes the memory along: %s", directory.name, travels)
            train_steps.push_checkpoint(directory, session.cfg)
        if not passing:
            recorder.checkpoint(directory)
    session.accelerator.wait_for_everyone()


def _state(session: Session, origin: Origin, passing: bool) -> dict[str, Any]:
    state: dict[str, Any] = {"origin": origin.to_json(), "method": session.method.state_dict()}
    if passing:
        state |= {PASSING: True}
    return state if session.before is None else state | {"memory": session.before.fingerprint()}


def _write(session: Session, directory: Path, gathered: tuple[dict[str, Any], dict[str, Any]] | None) -> None:
    train_steps.write_checkpoint(
        directory,
        session.step,
        session.cfg,
        session.student,
        session.optimizer,
        session.scheduler,
        session.processors,
        session.accelerator.num_processes,
        session.step_frames,
        gathered,
    )


def save_policy(session: Session, recorder: "Recorder", directory: Path, note: str) -> None:
    """A policy alone, as `lerobot-eval --policy.path` reads it, into `directory`; the note goes into its card."""
    with whole_or_not_at_all(directory) as partial:
        train_steps.write_policy(partial, session.cfg, session.student, session.processors)
        save_craft_config(session.craft, partial)
        if session.carried is not None:
            link_files(session.carried.directory, partial / MEMORY_FOLDER)
        (partial / CARD_FILE).write_text(recorder.card(session, note), encoding="utf-8")
