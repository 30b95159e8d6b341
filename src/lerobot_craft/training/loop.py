"""The loop: lerobot's own update, with the method's gradient in it, and everything that is written down on the way."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lerobot_craft.core import NonFiniteGradientError
from lerobot_craft.core.ranks import gather_over_ranks
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.lerobot_api.train_parts import to_device
from lerobot_craft.lerobot_api.train_steps import restore_stream, start_stream
from lerobot_craft.training.accumulation import AccumulatingPolicy, micro_batches
from lerobot_craft.training.checkpoints import last_checkpoint, resume_command
from lerobot_craft.training.methods.method import Method
from lerobot_craft.training.peers import require_agreement
from lerobot_craft.training.recorder import Recorder
from lerobot_craft.training.saving import Interruption, save
from lerobot_craft.training.session import Session

logger = logging.getLogger(__name__)

_BATCH_NAMES = ("episode_index", "frame_index")
_NAMES_SHOWN = 8


class MethodAccelerator:
    """What lerobot's update asks of accelerate; differentiating and clipping are the method's.

    Attributes:
        task_loss: This rank's own, once there is one: after the backward the gradient is that of all ranks.
    """

    def __init__(self, accelerator: Any, method: Method) -> None:
        self._accelerator = accelerator
        self._method = method
        self.task_loss: Tensor | None = None
        self.clip_grad_norm_ = method.clip

    def backward(self, loss: Tensor) -> None:
        """Leave the gradient of the step in `.grad`."""
        self.task_loss = loss.detach()
        self._method.backward(loss)

    def unwrap_model(self, policy: Any, **options: Any) -> Any:
        """The policy itself, also where something stands in for it."""
        policy = policy.policy if isinstance(policy, AccumulatingPolicy) else policy
        return self._accelerator.unwrap_model(policy, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


def run_steps(session: Session, recorder: Recorder) -> int:
    """All steps that are left, with logs, evaluations and checkpoints where they are due.

    Returns:
        The signal that ended them early, once all was saved; 0 where none did.
    """
    cfg, accelerator = session.cfg, session.accelerator
    tracker = train_steps.make_tracker(session.step_frames, session.data.dataset, accelerator, session.step)
    if session.craft.enabled and not cfg.resume:
        start_stream(cfg.seed, accelerator.process_index)
    batches = session.data.batches(_restore_rng(session))
    session.policy.train()
    bar = tqdm(total=cfg.steps, initial=session.step, desc="Training", unit="step", disable=not recorder.shows_bar)
    interruption = Interruption(
        active=session.craft.enabled and cfg.save_checkpoint,
        save_minutes=session.craft.save_minutes,
        main=accelerator.is_main_process,
    )
    with bar, _lines_above_the_bar(), interruption:
        while session.step < cfg.steps:
            _take_step(session, batches, tracker)
            session.step += 1
            interruption.listen()
            bar.update()
            recorder.after_step(session, tracker, bar)
            saves = train_steps.should_save(session.step, cfg)
            _check_ranks(session, saves)
            _evaluate_held_out(session, recorder)
            if saves:
                save(session, recorder)
                interruption.saved()
            _evaluate_in_env(session, recorder, interruption)
            due, stop = interruption.decide()
            if due and not saves:
                _check_ranks(session, saves=True)
                save(session, recorder, passing=True)
                interruption.saved()
            if stop and session.step < cfg.steps:
                _say_goodbye(session, stop)
                return stop
    return 0


def _say_goodbye(session: Session, number: int) -> None:
    saved = last_checkpoint(session.cfg.output_dir)
    if session.accelerator.is_main_process and saved is not None:
        launched = ", launched as before" if session.accelerator.num_processes > 1 else ""
        logger.info(
            "%s: stopped after step %d of %d. Saved: %s. To go on%s:\n%s",
            *(signal.Signals(number).name, session.step, session.cfg.steps, saved, launched, resume_command(saved)),
        )


def _check_ranks(session: Session, saves: bool) -> None:
    every = session.craft.check_ranks_freq
    if session.craft.enabled and every > 0 and (saves or session.step % every == 0):
        require_agreement(session)


@contextmanager
def _lines_above_the_bar() -> Iterator[None]:
    """Log lines do not break the progress bar. tqdm's handler forgets the level of the one that it stands in for."""
    root = logging.getLogger()
    before = list(root.handlers)
    level = max((handler.level for handler in before if type(handler) is logging.StreamHandler), default=logging.INFO)
    with logging_redirect_tqdm():
        for handler in root.handlers:
            if handler not in before:
                handler.setLevel(level)
        yield


def _restore_rng(session: Session) -> Any | None:
    cfg = session.cfg
    if not cfg.resume:
        return None
    rank = session.accelerator.process_index if session.craft.enabled else 0  # lerobot-train: the main one's for all
    return lambda: restore_stream(cfg.checkpoint_path, rank, cfg.seed, session.step)


def _take_step(session: Session, batches: Iterator[Any], tracker: Any) -> None:
    began = time.perf_counter()
    enabled, method = session.craft.enabled, session.method
    raw = next(batches)
    extended = method.extend(raw, session.step) if enabled else raw
    policy: Any = session.policy
    if session.craft.accumulate > 1:
        batch: Any = micro_batches(extended, session.craft.accumulate)
        policy = AccumulatingPolicy(
            policy, session.accelerator, lambda part: session.to_batch(to_device(part, session.accelerator))
        )
    else:
        batch = session.to_batch(extended)
    tracker.dataloading_s = time.perf_counter() - began
    grad_clip_norm = session.cfg.optimizer.grad_clip_norm
    accelerator = MethodAccelerator(session.accelerator, method)
    try:
        train_steps.update(
            tracker,
            policy,
            batch,
            session.optimizer,
            # Nothing is clipped at 0; lerobot then does not ask the accelerator, and nobody would see a NaN.
            grad_clip_norm=float("inf") if enabled and grad_clip_norm <= 0 else grad_clip_norm,
            accelerator=accelerator if enabled else session.accelerator,
            lr_scheduler=session.scheduler,
            sample_weighter=session.weighter,
        )
    except NonFiniteGradientError as error:
        part = policy.first_not_finite() if isinstance(policy, AccumulatingPolicy) else None
        blamed = raw if part is None or _BATCH_NAMES[0] not in batch[part] else batch[part]
        raise CraftError(_not_finite(session, blamed, accelerator.task_loss, error)) from error
    if enabled:
        method.advance()


def _not_finite(session: Session, raw: Any, task_loss: Tensor | None, error: NonFiniteGradientError) -> str:
    if error.which == "task":
        batch = _batch_to_blame(session.cfg.dataset.repo_id, raw, task_loss, session.accelerator.process_index)
        batch += session.method.beside_a_batch
    else:
        batch = f"the anchors of anchor step {session.step // session.method.every + 1}"
    saved = last_checkpoint(session.cfg.output_dir)
    kept = (
        f"the last good checkpoint is {saved}; go on from it with `{resume_command(saved)}`"
        if saved
        else "no checkpoint had been written yet"
    )
    return (
        f"at step {session.step + 1} the {error.which} gradient is not finite (NaN or infinity), so this step was not "
        f"taken. It came from {batch}. Look at these frames; if they are sound, lower the learning rate. Nothing was "
        f"overwritten: {kept}"
    )


def _batch_to_blame(repo_id: str, raw: Any, task_loss: Tensor | None, rank: int) -> str:
    """Whose batch it was, and its frames. A collective: the gradient is that of all ranks, so all come here."""
    finite = task_loss is None or bool(task_loss.isfinite().all())
    reports = gather_over_ranks(torch.cat([torch.tensor([finite]), _first_frames(raw)])).tolist()  # [ranks, 2 + 2 n]
    if len(reports) == 1:
        return f"the batch of {repo_id}{_frames(reports[0][1:])}"
    blamed = [number for number, report in enumerate(reports) if not report[0]]
    if not blamed:
        mine = f"this is rank {rank}{_frames(reports[rank][1:])}"
        return f"one of the batches of {repo_id} on {len(reports)} ranks, whose losses are all finite ({mine})"
    first, *others = blamed
    more = f", and those of {len(others)} more of the {len(reports)} ranks" if others else ""
    return f"the batch of {repo_id} on rank {first}{_frames(reports[first][1:])}{more}"


def _first_frames(raw: Any) -> Tensor:
    """How many frames a batch has (0: it does not say), then episode and frame of the first: int64 [1 + 2 n]."""
    named = torch.zeros(1 + 2 * _NAMES_SHOWN, dtype=torch.int64)
    if all(isinstance(raw.get(name), Tensor) for name in _BATCH_NAMES):
        rows = torch.stack([raw[name].flatten().cpu().long() for name in _BATCH_NAMES], dim=1)  # [B, 2]
        shown = rows[:_NAMES_SHOWN].flatten()
        named[0] = len(rows)
        named[1 : 1 + len(shown)] = shown
    return named


def _frames(report: list[int]) -> str:
    """`: episode 1 frame 0, ...` of what `_first_frames` says of a batch; nothing where it does not say."""
    count, *numbers = report
    shown = min(count, _NAMES_SHOWN)
    names = [f"episode {numbers[2 * n]} frame {numbers[2 * n + 1]}" for n in range(shown)]
    more = f" and {count - shown} more" if count > shown else ""
    return f": {', '.join(names)}{more}" if names else ""


def _evaluate_held_out(session: Session, recorder: Recorder) -> None:
    cfg = session.cfg
    if session.data.held_out is None or cfg.eval_steps <= 0 or session.step % cfg.eval_steps:
        return
    with recorder.undisturbed():
        loss = train_steps.held_out_loss(session.policy, session.data, session.to_batch, session.accelerator)
    recorder.held_out(session.step, loss)


def _evaluate_in_env(session: Session, recorder: Recorder, interruption: Interruption) -> None:
    cfg = session.cfg
    if not cfg.env or cfg.env_eval_freq <= 0 or session.step % cfg.env_eval_freq:
        return
    if session.accelerator.is_main_process:
        interruption.run_unless_stopped(lambda: _roll_out(session, recorder))
    session.accelerator.wait_for_everyone()


def _roll_out(session: Session, recorder: Recorder) -> None:
    logger.info("Eval policy at step %d", session.step)
    with recorder.undisturbed():
        found = train_steps.evaluate_in_env(
            session.cfg, session.policy, session.processors, session.accelerator, session.step
        )
    recorder.env(session.step, found)
