"""What a person reads while a run goes on: banner, step line, bar, old tasks. Values in, text out."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.modes.registry import mode_named
from lerobot_craft.training.anchoring.checks import StartReport
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Cost
from lerobot_craft.training.records.outcomes import OVER, Outcome

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
    if config.method == "craft":
        lines = [*_anchor_lines(config, anchors, tasks, cache_dir), "CRaFT enabled", *_constraint_lines(config)]
    else:
        lines = [f"Method: {config.method}", f"It holds: {_what_it_holds(config)}"]
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
        if value is None or value is False or (key == "method" and value == "craft"):
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


def number(value: float) -> str:
    """Three decimals, unless they would hide what is not zero or run on for millions."""
    value = float(value) + 0.0  # no minus before a zero
    text = f"{value:.3f}"
    hidden = value != 0 and float(text) == 0
    return f"{value:.1e}" if hidden or 1e6 <= abs(value) < math.inf else text


def human_bytes(size: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def count(n: int, noun: str) -> str:
    """A number and its noun, in the plural unless it is 1."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


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


def interval(outcome: Outcome) -> str:
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
        f"Anchor batch size: {config.anchor_batch_size}",
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


def _what_it_holds(config: CraftConfig) -> str:
    held = {
        "naive": "nothing, this is plain fine-tuning",
        "er": f"{config.replay_frames} frames of {config.old_dataset.repo_id or 'the old datasets'} in memory; "
        f"{config.replay_ratio:g} of them join the batch for each new frame",
        "l2sp": f"the weights near where they began (alpha {config.l2sp_alpha:g})",
        "ewc": f"the weights near where they began, by their Fisher information on {config.ewc_samples} old frames "
        f"(lambda {config.ewc_lambda:g})",
        "lwf": f"the teacher's outputs on the new data (weight {config.lwf_lambda:g})",
        "merge": "nothing while it trains; afterwards the weights are averaged with those before, shares of the new "
        f"ones {config.merge_alphas}",
        "freeze": f"these parameters as they are: {config.freeze}",
    }
    return held[config.method]
