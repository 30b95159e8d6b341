"""One run of `craft train`, from validated settings to the summary."""

import contextlib
import logging
import signal
from functools import partial
from typing import Any

from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.lerobot_api.train_parts import check_launch, make_accelerator
from lerobot_craft.training.checkpoints import (
    CHECKPOINTS,
    claim_run_dir,
    clear_leftovers,
    point_last_at_resumed,
    refuse_copied_link,
)
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.loop import run_steps
from lerobot_craft.training.peers import stops_with_its_peers
from lerobot_craft.training.recorder import Recorder
from lerobot_craft.training.saving import save_policy
from lerobot_craft.training.session import Session, open_session

logger = logging.getLogger(__name__)


def train(cfg: Any, craft: CraftConfig, command: str = "") -> None:
    """Train as lerobot-train does, and with `craft.enabled` hold on to what the policy could do.

    Args:
        cfg: lerobot's validated `TrainPipelineConfig`.
        craft: `--craft.*`.
        command: The line that started it, for the run's records.

    Raises:
        KeyboardInterrupt: A Ctrl-C ended it, after a checkpoint.
        SystemExit: A SIGTERM did; with the exit code by which a shell reports it.
    """
    accelerator = make_accelerator(cfg)
    check_launch(cfg, accelerator, enabled=craft.enabled)
    with stops_with_its_peers(cfg.output_dir):
        stopped = _train(cfg, craft, accelerator, command)
    accelerator.end_training()
    if stopped == signal.SIGINT:
        raise KeyboardInterrupt
    if stopped:
        raise SystemExit(128 + stopped)


def _train(cfg: Any, craft: CraftConfig, accelerator: Any, command: str) -> int:
    """Everything; returns the signal that ended it early, or 0."""
    # lerobot's validation refuses a directory that exists: no rank may make it before all have validated.
    accelerator.wait_for_everyone()
    main = accelerator.is_main_process
    if not craft.enabled and craft != type(craft)(preload=craft.preload):
        logger.warning("--craft.enabled is false: this is lerobot-train, and the other --craft flags have no effect")
    with claim_run_dir(cfg.output_dir, resume=cfg.resume) if main else contextlib.nullcontext():
        if main and cfg.resume:
            refuse_copied_link(cfg.output_dir / CHECKPOINTS)
            for path in clear_leftovers(cfg.output_dir):
                logger.info("cleared %s, which an interrupted save had left", path)
        session = open_session(cfg, craft, accelerator, command)
        if main and cfg.resume:
            point_last_at_resumed(cfg.output_dir, cfg.checkpoint_path)
        stopped = _run(session)
        accelerator.wait_for_everyone()
        return stopped


def _run(session: Session) -> int:
    cfg = session.cfg
    with contextlib.closing(Recorder(session, session.probe)) as recorder:
        recorder.announce(session)
        if stopped := run_steps(session, recorder):
            return stopped
        if session.accelerator.is_main_process:
            if session.craft.enabled:
                session.method.finish(partial(save_policy, session, recorder))
            recorder.conclude(session)
    if session.accelerator.is_main_process:
        logger.info("End of training")
        if cfg.policy.push_to_hub:
            card = recorder.card(session) if session.craft.enabled else None
            memory = None if session.carried is None else session.carried.directory
            if session.carried is not None:
                logger.info(
                    "the push to %s takes the memory along: %s (--craft.remember=0 and `craft remember --forget` leave "
                    "pictures out)",
                    cfg.policy.repo_id,
                    "; ".join(session.carried.lines()),
                )
            train_steps.push_policy(cfg, session.student, session.processors, session.data.dataset, card, memory)
    return 0
