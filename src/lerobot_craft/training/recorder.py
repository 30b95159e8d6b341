"""What is written down of a run: lines, the bar, run.json, metrics.jsonl, lambda_history.csv, wandb, time, memory."""

import contextlib
import dataclasses
import logging
import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm import tqdm

from lerobot_craft import __version__
from lerobot_craft.anchors.recipe import OLD_DATASET
from lerobot_craft.anchors.teacher import identity
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import train_steps
from lerobot_craft.training import lines
from lerobot_craft.training.action_drift import ActionProbe
from lerobot_craft.training.anchor_source import mode_of
from lerobot_craft.training.card import hub_facts, model_card
from lerobot_craft.training.checkpoints import last_checkpoint
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.journal import (
    AnchorsHeld,
    Held,
    Journal,
    RunFile,
    Took,
    read_history,
    read_metrics,
    write_run_file,
)
from lerobot_craft.training.lines import Peak, Timing, budget_unit
from lerobot_craft.training.outcomes import Outcomes, of_actions, outcomes
from lerobot_craft.training.run_settings import as_json
from lerobot_craft.training.session import Session
from lerobot_craft.training.start_checks import StartReport

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


def describe_run(session: Session, craft: CraftConfig, tasks: Sequence[str]) -> RunFile:
    """What is known before the first step; `craft` as the method has settled it."""
    if session.origin is None:
        raise CraftError("a run without CRaFT is lerobot-train, which keeps no record of this kind")
    cfg, anchors = session.cfg, session.method.old_anchors
    return RunFile(
        craft_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=session.command,
        method=craft.method,
        mode=None if anchors is None else mode_of(anchors),
        policy=cfg.policy.type,
        dataset=cfg.dataset.repo_id,
        old_datasets=[name for name, _ in session.craft.old_dataset.addresses(OLD_DATASET)],
        steps=cfg.steps,
        batch_size=session.step_frames,
        teacher=session.origin.path,
        fingerprint=identity(session.origin.fingerprint),
        tasks=list(tasks),
        budget_unit=budget_unit(craft) if session.method.has_multipliers else None,
        conflict_threshold=craft.conflict_threshold,
        anchors=None if anchors is None else AnchorsHeld(anchors.source, anchors.num_anchors, anchors.stored_bytes),
        costs=_held(session),
        measured_on=None if session.probe is None else session.probe.measured_on,
        memory=[] if session.carried is None else session.carried.lines(),
    )


def ended_run(run: RunFile, session: Session, timing: Timing, peak: Peak) -> RunFile:
    """The same after the last step."""
    took = Took(**dataclasses.asdict(timing), **{f"{name}_bytes": n for name, n in dataclasses.asdict(peak).items()})
    return dataclasses.replace(run, costs=_held(session), end_step=session.step, took=took)


def _held(session: Session) -> list[Held]:
    return [Held(cost.what, cost.bytes) for cost in session.method.costs()]


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
        self._craft = session.method.settled if enabled else session.craft
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
            tasks=self.tasks if session.method.per_task else (),
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
            self._run = describe_run(session, self._craft, self.tasks)
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
        write_run_file(cfg.output_dir, ended_run(self._described(session), session, timing, peak))
        text = lines.run_summary(
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
