"""The end of a run: what was retained, what it cost, where the checkpoint is and how to run it."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Cost
from lerobot_craft.training.records.lines import (
    against,
    aligned,
    budget_unit,
    cost_lines,
    count,
    human_bytes,
    interval,
    number,
)
from lerobot_craft.training.records.outcomes import Outcome

_ABSOLUTE = "absolute"
_BY_HEART = 2.0  # times the drift on anchors that were visited
_MOSTLY = 0.5  # of the anchor steps
_STILL_FALLING = 0.75  # of the quarter before: docs/metrics.md
_LOOSER = 3.0  # times the bound: what was tried in docs/decisions/0026


@dataclass(frozen=True)
class Timing:
    """Where the seconds of the steps went, as this process measured them.

    Attributes:
        steps: Steps that were measured.
        anchor_steps: Those of them that visited anchors.
        plain_s: Seconds of all of them without the method's own part.
        extra_s: Seconds of the method's own part.
        start_s: Seconds that it took before the first step: building anchors, checks, measurements.
    """

    steps: int
    anchor_steps: int
    plain_s: float
    extra_s: float
    start_s: float = 0.0


@dataclass(frozen=True)
class Peak:
    """The most memory that was in use, in bytes, as measured.

    Attributes:
        process: Of main memory by this process, at any time; None where the system does not tell.
        gpu_plain: Of the GPU in steps without anchors; None where there were none, or no GPU.
        gpu_anchors: Of the GPU in steps with anchors, likewise.
    """

    process: int | None = None
    gpu_plain: int | None = None
    gpu_anchors: int | None = None


def summary(
    *,
    config: CraftConfig,
    step: int,
    epsilon: float | None,
    retained: Sequence[Outcome],
    timing: Timing,
    costs: Sequence[Cost],
    peak: Peak,
    checkpoint: Path | None,
    eval_flags: Mapping[str, object],
    held_out: int = 0,
    bounded_share: float = 0.0,
    bound: float = math.inf,
    measured_on: str | None = None,
    last_losses: tuple[float, float] | None = None,
) -> str:
    """The end of a run: what was retained, what it cost, where the checkpoint is and how to run it.

    Args:
        config: `--craft.*`.
        step: The last step.
        epsilon: The budget there; None for a method without one.
        retained: All old tasks together, then each.
        timing: Of this process.
        costs: Memory beyond plain fine-tuning.
        peak: Memory in use, as measured.
        checkpoint: The last one (`.../checkpoints/000100`); None if this process wrote none.
        eval_flags: See `eval_command`.
        held_out: Anchors of the action drift, if no step visited them.
        bounded_share: Of the anchor steps those whose weighted retention gradient was shortened to its bound.
        bound: That bound.
        measured_on: What the drift of the actions was measured on, in words; None where it was not measured.
        last_losses: Mean task loss of the third and of the last quarter of the steps; None if there were too few.
    """
    lines = [f"End of training: method {config.method}, step {step}", *_retained_lines(config, epsilon, retained)]
    if measured_on is not None:
        lines.append(f"  Action drift: {measured_on}.")
    lines += _by_heart_lines(config, epsilon, retained, held_out)
    lines += _bound_lines(epsilon, retained, bounded_share, bound)
    lines += _learning_lines(step, last_losses)
    memory = cost_lines("memory:", costs) or ["memory: none"]
    lines += ["What it cost beyond plain fine-tuning:", *(f"  {line}" for line in [_time_text(timing), *memory])]
    lines += [f"  {line}" for line in _peak_lines(peak)]
    if checkpoint is None:
        return "\n".join([*lines, "Checkpoint: this process wrote none."])
    return "\n".join([*lines, f"Checkpoint: {checkpoint}", "Run it:", f"  {eval_command(checkpoint, eval_flags)}"])


def eval_command(checkpoint: Path, flags: Mapping[str, object]) -> str:
    """The `lerobot-eval` line for a checkpoint, quoted for a shell.

    Args:
        checkpoint: The directory that holds `pretrained_model`.
        flags: What follows, by name: `{"env.type": "pusht", "eval.n_episodes": 10, ...}`. Without `env.type` its place
            is left for the reader to fill.
    """
    wanted = {"policy.path": checkpoint / "pretrained_model", "env.type": "<your env>", **flags}
    return shlex.join(["lerobot-eval", *(f"--{name}={_flag_value(value)}" for name, value in wanted.items())])


def _retained_lines(config: CraftConfig, epsilon: float | None, retained: Sequence[Outcome]) -> list[str]:
    measured = [outcome for outcome in retained if outcome.visits or outcome.action_drift is not None]
    if not measured:
        return ["What was retained: not measured, there were no anchors. Run the old tasks to see."]
    verified = any(outcome.verified for outcome in measured)
    title = "What was retained" if verified else "What was retained is unverified"
    if epsilon is not None:
        title += f" ({budget_unit(config)})"
    names = aligned(["all old tasks" if outcome.task is None else repr(outcome.task) for outcome in measured])
    return [f"{title}:", *(f"  {name} | {_fate(o, epsilon)}" for name, o in zip(names, measured, strict=True))]


def _by_heart_lines(
    config: CraftConfig, epsilon: float | None, retained: Sequence[Outcome], held_out: int
) -> list[str]:
    """Say so where the anchors were learned and not what they stand for: comparable where actions are retained."""
    comparable = config.retention_mode == "action" and config.loss_type is None and config.epsilon_unit != _ABSOLUTE
    overall = next((outcome for outcome in retained if outcome.task is None), None)
    if not held_out or not comparable or epsilon is None or overall is None:
        return []
    visited, unseen = overall.drift, overall.action_drift
    if visited is None or unseen is None or unseen <= epsilon or unseen < _BY_HEART * visited:
        return []
    return [
        f"  On {held_out} anchors that no step visited the actions drifted by {number(unseen)}, where the budget is "
        f"{number(epsilon)} and the others show {number(visited)}: those were learned by heart. More of them "
        "(--craft.num_anchors) hold better."
    ]


def _bound_lines(epsilon: float | None, retained: Sequence[Outcome], bounded_share: float, bound: float) -> list[str]:
    """Say so where the budget was missed and the multipliers could not have helped."""
    if bounded_share < _MOSTLY or not any(outcome.is_over(epsilon) for outcome in retained):
        return []
    return [
        f"  In {bounded_share:.0%} of the anchor steps the weighted retention gradient was at its bound, {bound:g}: "
        f"larger multipliers give it no more weight. --craft.retention_max_norm={_LOOSER * bound:g} holds the old "
        "tasks closer, and the new task learns more slowly."
    ]


def _learning_lines(step: int, last_losses: tuple[float, float] | None) -> list[str]:
    """Say so where the run ended before the new task was learned: the constraint makes learning slower."""
    if last_losses is None or not last_losses[1] < _STILL_FALLING * last_losses[0]:
        return []
    before, last = map(number, last_losses)
    return [
        f"The task loss was still falling when the run ended, from {before} to {last} over its last two quarters: the "
        f"new task may not be learned yet. Train longer (--steps={2 * step}), or let the policy drift further "
        "(--craft.epsilon_end, with a memory)."
    ]


def _fate(outcome: Outcome, epsilon: float | None) -> str:
    parts = []
    if outcome.action_drift is not None:
        where = "kept-out drift" if outcome.verified else "action drift"
        budget = epsilon if outcome.verified else None
        parts.append(f"{where} {interval(outcome)}" + ("" if budget is None else f" of {number(budget)}"))
    if outcome.drift is not None:
        parts.append(f"drift on trained anchors {against(outcome.drift, epsilon, ' of ')} (n={outcome.visits})")
    if (verdict := outcome.verdict(epsilon)) is not None:
        parts.append(verdict)
    return " | ".join(parts)


def _time_text(timing: Timing) -> str:
    if timing.steps == 0 or timing.plain_s <= 0:
        return "time: not measured, no step was taken"
    plain, extra = timing.plain_s / timing.steps, timing.extra_s / timing.steps
    visits = f", {timing.anchor_steps} with anchors" if timing.anchor_steps else ""
    return (
        f"time: {number(extra)} s per step on top of {number(plain)} s (+{extra / plain:.1%}), "
        f"measured over {count(timing.steps, 'step')} of this process{visits}; {number(timing.start_s)} s before them"
    )


def _peak_lines(peak: Peak) -> list[str]:
    lines = [] if peak.process is None else [f"peak of the whole process: {human_bytes(peak.process)}"]
    if peak.gpu_plain is not None and peak.gpu_anchors is not None:
        more = human_bytes(max(0, peak.gpu_anchors - peak.gpu_plain))
        lines.append(f"peak of the GPU: {human_bytes(peak.gpu_plain)}, in steps with anchors {more} more")
    return lines


def _flag_value(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | dict | list) else str(value)
