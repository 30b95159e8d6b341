"""What is written down of a run: lines, the bar, metrics.jsonl, lambda_history.csv, wandb, and the end."""

import contextlib
import logging
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.training.anchoring.checks import StartReport
from lerobot_craft.training.anchoring.probe import ActionProbe
from lerobot_craft.training.output.card import hub_facts, model_card
from lerobot_craft.training.output.checkpoints import last_checkpoint
from lerobot_craft.training.records import lines, summary
from lerobot_craft.training.records.describe import describe, ended
from lerobot_craft.training.records.journal import Journal, read_history, read_metrics
from lerobot_craft.training.records.measured import Measured
from lerobot_craft.training.records.outcomes import Outcomes, of_actions, outcomes
from lerobot_craft.training.records.run_file import RunFile, write_run_file
from lerobot_craft.training.session import Session
from lerobot_craft.training.settings import as_json

logger = logging.getLogger(__name__)

# lerobot's meters that a logged step repeats.
_METERS = ("loss", "grad_norm", "lr", "update_s", "dataloading_s", "samples_per_s", "gpu_mem_gb")


class Recorder:
    """Of one run. All ranks have one, because some of what is logged is measured by all; the main one writes.

    Without CRaFT it logs what lerobot-train logs, and writes no file of its own.

    Args:
        session: The run.
        probe: Measures the drift of the actions; None where nothing is known to measure it on.
    """

    def __init__(self, session: Session, probe: ActionProbe | None = None) -> None:
        enabled = session.craft.enabled
        # A method may have settled what the flags left open.
        self._craft = session.method.context.config if enabled else session.craft
        self._main = session.accelerator.is_main_process
        self._probe = probe
        self._run: RunFile | None = None
        self._seen: dict[str, Any] = {}  # of the latest anchor step since the last line
        self._measured = Measured()
        known = (session.method.old_anchors if enabled else None) or probe
        self.tasks: tuple[str, ...] = () if known is None else tuple(known.tasks)
        self._keeps_history = self._craft.save_lambda_history and session.method.has_multipliers
        self._wandb = self._journal = None
        if self._main:
            self._wandb = train_steps.make_wandb(session.cfg, as_json(session.craft) if enabled else None)
            self._journal = self._open_journal(session) if enabled else None
        self._outcomes = self._recalled(session) if self._journal is not None else Outcomes(self.tasks)
        self.checkpoint_dir: Path | None = None

    def _open_journal(self, session: Session) -> Journal:
        return Journal(
            session.cfg.output_dir,
            history=self._keeps_history,
            tasks=self.tasks if self._craft.lambda_per_task else (),
            modules=session.method.modules,
            resume_step=session.step if session.cfg.resume else None,
        )

    def _recalled(self, session: Session) -> Outcomes:
        """How the old tasks came through before a resume: by every anchor step where those are kept, else by lines."""
        if not session.cfg.resume:
            return Outcomes(self.tasks)
        output_dir = session.cfg.output_dir
        return outcomes(read_metrics(output_dir), self.tasks, read_history(output_dir) if self._keeps_history else None)

    @property
    def shows_bar(self) -> bool:
        """Whether this process draws a progress bar."""
        return self._main and train_steps.bar_is_welcome()

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Around what a resumed run may not do again: the steps after it are the same with and without it.

        lerobot-train lets evaluations draw from the generators of training, and without CRaFT it stays so.
        """
        return train_steps.undisturbed_rng() if self._craft.enabled else contextlib.nullcontext()

    def after_step(self, session: Session, tracker: Any, bar: "tqdm[Any]") -> None:
        """Count the step, and log it if that is due."""
        tracker.step()
        step, cfg = session.step, session.cfg
        detailed = self._craft.enabled and (step == cfg.steps or _every(self._craft.log_craft_metrics_freq, step))
        due = detailed or _every(cfg.log_freq, step)
        if self._craft.enabled:
            self._note(session, tracker, detailed)
        if not due:
            return
        tracker.reduce_across_ranks()
        if self._main:
            self._rate(session, tracker)
            if self._craft.enabled:
                self._log(session, tracker, bar, detailed)
            else:
                logger.info(tracker)
                self._to_wandb(tracker.to_dict() | train_steps.weighter_stats(session.weighter), step)
        tracker.reset_averages()

    def _note(self, session: Session, tracker: Any, detailed: bool) -> None:
        """What the method measured at this step; a line shows the latest anchor step since the line before."""
        found = session.method.metrics()
        self._measured.add(tracker, found)
        is_anchor_step = "retention_loss" in found
        if detailed:
            found |= self._measure_actions(session)
        found = _finite(found, session.step)
        self._outcomes.add(found)
        if is_anchor_step:
            if self._journal is not None:
                self._journal.anchor_step({"step": session.step, **found})
        elif "retention_loss" in self._seen:
            found = of_actions(found)
        self._seen |= found

    def _measure_actions(self, session: Session) -> dict[str, Any]:
        if self._probe is None:
            return {}
        return self._probe.measure(session.student).with_intervals()

    def _log(self, session: Session, tracker: Any, bar: "tqdm[Any]", detailed: bool) -> None:
        step = session.step
        meters = {name: value for name, value in tracker.to_dict().items() if name in _METERS}
        values: dict[str, Any] = {"step": step, **meters, "method": self._craft.method, **self._seen}
        self._seen = {}
        values = _finite(values, step)
        logger.info(lines.step_line(step, session.cfg.steps, values))
        if detailed:
            for line in lines.task_lines(values, self.tasks):
                logger.info(line)
            if self._probe is not None:
                logger.info("  action_drift: %s", self._probe.measured_on)
        bar.set_postfix_str(lines.bar_text(values))
        if self._journal is not None:
            self._journal.log(values)
        own = {f"craft/{name}": value for name, value in values.items() if name not in _METERS}
        self._to_wandb(tracker.to_dict() | train_steps.weighter_stats(session.weighter) | own, step)

    def _rate(self, session: Session, tracker: Any) -> None:
        seconds = tracker.update_s.avg + tracker.dataloading_s.avg
        if seconds > 0:
            tracker.samples_per_s = session.step_frames * session.accelerator.num_processes / seconds

    def _to_wandb(self, values: dict[str, Any], step: int, mode: str = "train") -> None:
        if self._wandb is not None:
            self._wandb.log_dict(values, step, mode=mode)

    def held_out(self, step: int, loss: float) -> None:
        """The loss on held-out episodes."""
        if self._main:
            logger.info("step %d: eval_loss=%.4f", step, loss)
            self._to_wandb({"eval_loss": loss}, step, mode="eval")

    def env(self, step: int, found: Any) -> None:
        """What rollouts in the environment found."""
        for suite, result in found.items():
            logger.info("Suite %s aggregated: %s", suite, result)
        overall = found["overall"]
        scores = {name: overall[name] for name in ("avg_sum_reward", "pc_success", "eval_s") if name in overall}
        self._to_wandb(scores, step, mode="eval")
        if self._wandb is not None and overall.get("video_paths"):
            self._wandb.log_video(overall["video_paths"][0], step, mode="eval")

    def flush(self) -> None:
        """Make all lines durable."""
        if self._journal is not None:
            self._journal.flush()

    def checkpoint(self, directory: Path) -> None:
        """A checkpoint was written."""
        self.checkpoint_dir = directory
        if self._wandb is not None:
            self._wandb.log_policy(directory)

    def announce(self, session: Session) -> None:
        """The banner, before the first step."""
        if not self._main or not self._craft.enabled:
            return
        anchors = session.method.old_anchors
        text = lines.banner(
            self._craft,
            anchors=None if anchors is None else anchors.num_anchors,
            tasks=self.tasks,
            cache_dir=None if anchors is None else anchors.directory,
            costs=session.method.costs(),
            compute=session.method.compute(),
            memory=_memory_lines(session),
        )
        checked: StartReport | None = getattr(session.method, "start_report", None)
        for line in [*text.splitlines(), *(lines.start_lines(checked) if checked is not None else ())]:
            logger.info(line)
        write_run_file(session.cfg.output_dir, self._described(session))

    def card(self, session: Session, note: str = "") -> str:
        """The model card of a checkpoint at this step; with a note, of what was made of it and is not measured."""
        run, hub = self._described(session), hub_facts(session.cfg, session.craft.old_dataset)
        retained = [] if note else list(self._outcomes)
        return model_card(run, session.step, self._epsilon(session), retained, hub, note)

    def _described(self, session: Session) -> RunFile:
        """What the run is, with the time when this was first asked: before the first step."""
        if self._run is None:
            self._run = describe(session, self._craft, self.tasks)
        return self._run

    def _epsilon(self, session: Session) -> float | None:
        """The budget of the last step; None for a method without one."""
        return self._craft.epsilon(session.step - 1, session.cfg.steps) if session.method.has_multipliers else None

    def conclude(self, session: Session) -> None:
        """The summary, after the last step."""
        if self._journal is None:
            return
        self._journal.flush()
        cfg, craft = session.cfg, self._craft
        timing, peak = self._measured.timing(session.start_s), self._measured.peak()
        write_run_file(cfg.output_dir, ended(self._described(session), session, timing, peak))
        text = summary.summary(
            config=craft,
            step=session.step,
            epsilon=self._epsilon(session),
            retained=list(self._outcomes),
            timing=timing,
            costs=session.method.costs(),
            peak=peak,
            checkpoint=self.checkpoint_dir or last_checkpoint(cfg.output_dir),
            eval_flags=train_steps.eval_flags(cfg),
            held_out=self._probe.num_anchors if self._probe is not None and self._probe.held_out else 0,
            measured_on=None if self._probe is None else self._probe.measured_on,
            bounded_share=self._measured.bounded_share,
            bound=craft.surgery(cfg.optimizer.grad_clip_norm).retention_max_norm,
            last_losses=self._measured.last_losses,
        )
        for line in text.splitlines():
            logger.info(line)
        sys.stderr.flush()

    def close(self) -> None:
        """Make all lines durable and close the files, however the run ended."""
        if self._journal is not None:
            self._journal.close()


def _memory_lines(session: Session) -> list[str]:
    """Where old frames come from, what the drift of the actions is measured on, and what travels."""
    lines_of = [] if session.remembered is None else [session.remembered.line()]
    if session.probe is not None:
        lines_of.append(f"Action drift: {session.probe.measured_on}")
    if session.carried is not None:
        lines_of.append(f"Checkpoints will carry a memory: {'; '.join(session.carried.lines())}")
    return lines_of


def _finite(values: dict[str, Any], step: int) -> dict[str, Any]:
    """Without what is NaN or infinite, which no file of numbers takes; a warning names it."""
    if lost := [name for name, value in values.items() if isinstance(value, float) and not math.isfinite(value)]:
        logger.warning("not finite at step %d: %s", step, ", ".join(lost))
    return {name: value for name, value in values.items() if name not in lost}


def _every(frequency: int, step: int) -> bool:
    return frequency > 0 and step % frequency == 0
