"""A checkpoint of lerobot's own form, with CRaFT's settings and state beside it; whole or not at all."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lerobot_craft.anchors.manifest import MEMORY_FOLDER
from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.lerobot_api.random_streams import gather_streams, save_streams
from lerobot_craft.lerobot_api.training import checkpoint_directory
from lerobot_craft.training.master_weights import gather_masters, save_masters
from lerobot_craft.training.output.card_sections import CARD_FILE
from lerobot_craft.training.output.carried import link_files
from lerobot_craft.training.output.checkpoints import point_last_at, whole_or_not_at_all
from lerobot_craft.training.output.craft_state import PASSING, remove_passing, save_craft_state
from lerobot_craft.training.session import Origin, Session
from lerobot_craft.training.settings import save_craft_config
from lerobot_craft.training.sharding import gather_states

if TYPE_CHECKING:
    from lerobot_craft.training.records.recorder import Recorder

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
