"""What a person reads of a run: banner, step line, bar, old tasks, and the summary at its end. Values in, text out."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.retained import mode_named
from lerobot_craft.io.text import count, human_bytes, number
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Cost
from lerobot_craft.training.methods.registry import METHODS
from lerobot_craft.training.outcomes import OVER, Outcome
from lerobot_craft.training.start_checks import StartReport

# Key of docs/metrics.md -> name in the step line, in the line's order.
_STEP_LINE = {
    "loss": "loss",
    "grad_norm": "grdn",
    "lr": "lr",
    "update_s": "updt_s",
    "dataloading_s": "data_s",
    "method": "method",
    "mode": "mode",
    "retention_loss": "L_ret",
    "lambda": "λ",
    "epsilon": "ε",
    "penalty": "penalty",
    "conflict": "conflict",
    "dot": "dot",
    "cos": "cos",
}
_NORMALIZATION = {
    "keep": "the teacher's statistics are kept",
    "merge": "the teacher's statistics joined with the new data's",
    "replace": "the new data's statistics, as lerobot-train does: old inputs and outputs are re-scaled",
}
_TASK_WIDTH = 60


def banner(
    config: CraftConfig,
    *,
    anchors: int | None = None,
    tasks: Sequence[str] = (),
    cache_dir: Path | str | None = None,
    costs: Sequence[Cost] = (),
    compute: str = "nothing",
    memory: Sequence[str] = (),
) -> str:
    """What begins: for `craft` the anchors and the constraint, for another method what it holds.

    Args:
        config: `--craft.*`.
        anchors: How many there are.
        tasks: Old tasks that they belong to.
        cache_dir: Where they are kept; None: the teacher is online.
        costs: Memory beyond plain fine-tuning.
        compute: Work beyond it, in words.
        memory: What is known of the memory: where old frames come from, what is measured on, what travels.
    """
    if (held := METHODS[config.method].holds(config)) is None:
        lines = [*_anchor_lines(config, anchors, tasks, cache_dir), "CRaFT enabled", *_constraint_lines(config)]
    else:
        lines = [f"Method: {config.method}", f"It holds: {held}"]
    lines += memory
    lines.append(f"Normalization: {config.normalization} ({_NORMALIZATION[config.normalization]})")
    lines.append(f"Compute beyond plain fine-tuning: {compute}")
    return "\n".join([*lines, *cost_lines("Memory beyond plain fine-tuning:", costs)])


def start_lines(checked: StartReport) -> list[str]:
    """What was checked before the first step."""
    trained = checked.held + checked.free
    lines = [f"Retention reaches {checked.held} of {count(trained, 'trained tensor')}"]
    if checked.reproduction is not None:
        found = checked.reproduction
        lines.append(
            f"Drift at step 0: {found.largest:.1e} relative, over {count(found.anchors, 'anchor')} "
            f"(rounding leaves at most {found.floor:.0e})"
        )
    return lines


def step_line(step: int, total: int, values: Mapping[str, Any]) -> str:
    """One logged step, such as `Step 2/3 | loss=2.123 | ... | mode=hidden | L_ret=0.789 | λ=1.019 | ...`."""
    parts = [f"Step {step}/{total}"]
    for key, name in _STEP_LINE.items():
        value = values.get(key)
        if value is None or value is False or (key == "method" and value == CraftConfig.method):
            continue  # the line of `craft` says its mode
        if value is True:
            text = "✓"
        elif isinstance(value, str):
            text = value
        else:
            text = f"{value:.1e}" if key == "lr" else number(value)
        parts.append(f"{name}={text}")
    return " | ".join(parts)


def bar_text(values: Mapping[str, Any]) -> str:
    """What stands behind the progress bar: multiplier, drift against the budget, drift of the actions."""
    parts = [f"λ={number(values['lambda'])}"] if "lambda" in values else []
    if "retention_loss" in values:
        parts.append(f"drift={against(values['retention_loss'], values.get('epsilon'), '/')}")
    if "action_drift" in values:
        parts.append(f"action_drift={number(values['action_drift'])}")
    return " ".join(parts)


def task_lines(values: Mapping[str, Any], tasks: Sequence[str]) -> list[str]:
    """One line per old task: drift against the budget, multiplier, drift of the actions; over budget is marked."""
    epsilon = values.get("epsilon")
    lines = []
    for name, task in zip(aligned([repr(task) for task in tasks]), tasks, strict=True):
        drift = values.get(f"retention_loss/{task}")
        parts = [] if drift is None else [f"L_ret={against(drift, epsilon, '/')}"]
        if (lambda_ := values.get(f"lambda/{task}")) is not None:
            parts.append(f"λ={number(lambda_)}")
        if (action_drift := values.get(f"action_drift/{task}")) is not None:
            parts.append(f"action_drift={number(action_drift)}")
        if is_over(action_drift if values.get("verified") else drift, epsilon):
            parts.append(OVER)
        lines.append(" | ".join([f"  {name}", *(parts or ["not measured at this step"])]))
    return lines


def budget_unit(config: CraftConfig) -> str:
    """What a drift of 1 means beside epsilon."""
    if config.epsilon_unit == "absolute":
        return "unit: the loss itself"
    return f"1 = {', '.join(mode_named(mode).unit for mode in config.modes)} on that task"


def cost_lines(title: str, costs: Sequence[Cost]) -> list[str]:
    """The sum, then each part; no lines where there is no cost."""
    if not costs:
        return []
    total = human_bytes(sum(cost.bytes for cost in costs))
    return [f"{title} {total}", *(f"  {human_bytes(cost.bytes)} {cost.what}" for cost in costs)]


def against(drift: float, epsilon: float | None, between: str) -> str:
    """A drift, and the budget beside it where there is one."""
    return number(drift) if epsilon is None else f"{number(drift)}{between}{number(epsilon)}"


def drift_interval(outcome: Outcome) -> str:
    """The drift of the actions, with its interval where that is known."""
    value = "-" if outcome.action_drift is None else number(outcome.action_drift)
    if outcome.low is None or outcome.high is None:
        return value
    return f"{value} [{number(outcome.low)}, {number(outcome.high)}]"


def is_over(drift: float | None, epsilon: float | None) -> bool:
    """Whether a measured drift is above its budget."""
    return drift is not None and epsilon is not None and drift > epsilon


def aligned(names: Sequence[str]) -> list[str]:
    """Names padded to one width. Long ones lose their middle: instructions often differ in their last words only."""
    half = _TASK_WIDTH // 2
    short = [name if len(name) <= _TASK_WIDTH else f"{name[: half - 1]}…{name[-half:]}" for name in names]
    width = max(map(len, short), default=0)
    return [name.ljust(width) for name in short]


def _anchor_lines(
    config: CraftConfig, anchors: int | None, tasks: Sequence[str], cache_dir: Path | str | None
) -> list[str]:
    of_tasks = f" of {count(len(tasks), 'old task')}" if tasks else ""
    return [
        f"Anchor cache: {cache_dir if cache_dir is not None else 'none, the teacher is online'}",
        f"Anchor batch size: {config.anchor_batch_size}{' in place of new samples' if config.anchor_share else ''}",
        f"Retention frequency K: every {count(config.retention_freq, 'step')}",
        f"Number of anchors: {'unknown' if anchors is None else anchors}{of_tasks}",
        *(f"  {task!r}" for task in tasks),
    ]


def _constraint_lines(config: CraftConfig) -> list[str]:
    each = "one per old task" if config.lambda_per_task else "one in all"
    dual, (first, last) = config.dual(), config.budget()
    floor = f", min: {dual.lambda_min:g}" if dual.lambda_min else ""
    duration = f"{config.epsilon_decay_steps} steps" if config.epsilon_decay_steps else "all steps"
    return [
        f"Retention Mode: {config.retention_mode}",
        f"Initial lambda: {config.initial_lambda:g} ({each}, rule {dual.rule})",
        f"Lambda lr: {dual.lambda_lr:g}, max: {config.lambda_max:g}{floor}",
        f"Epsilon: {first:g} -> {last:g} ({config.epsilon_decay} over {duration}; {budget_unit(config)})",
        f"Gradient projection: {'on' if config.use_grad_projection else 'off'}",
        f"Conflict threshold: {config.conflict_threshold:g} (cosine)",
        f"Merge mode: {config.projection_mode}",
    ]


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


def run_summary(
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
        parts.append(f"{where} {drift_interval(outcome)}" + ("" if budget is None else f" of {number(budget)}"))
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
