"""The page's drawings of a bench: kept against learnt, drift against lost, sequences, and rollouts as pictures."""

import base64
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from lerobot_craft.evaluation.correlation import Kind, Pair, pairs_per_run, pairs_per_task
from lerobot_craft.evaluation.matrix import Evaluation, Row
from lerobot_craft.evaluation.results import Correlation, Correlations, Run, Summary, policy_name
from lerobot_craft.evaluation.summary import group_by_setting, success_matrix
from lerobot_craft.evaluation.table import grouped, number
from lerobot_craft.report.inputs import Strip
from lerobot_craft.report.plot import (
    BADGE,
    FAMILIES,
    Axes,
    Line,
    Point,
    Scale,
    curves,
    family_of,
    full_name,
    spread,
)
from lerobot_craft.report.templates import part, together

_UNIT = Scale(-0.04, 1.06)
_KINDS: dict[Kind, str] = {"action": "drift of actions", "hidden": "drift of hidden states"}
_STAGES = {"before": "before fine-tuning", "plain": "after plain fine-tuning", "craft": "after CRaFT"}
_DASHES = (None, "7 4", "2 4", "9 3 2 3", "12 4")


class _Method(NamedTuple):
    """A method or a checkpoint in the plane of old and new success."""

    name: str
    css: str
    old: float
    new: float


class _Badge(NamedTuple):
    """What is drawn of it: its exact place, and that of its numbered badge."""

    name: str
    css: str
    tip: str
    at: Point
    badge: Point


def retention_planes(rows: Sequence[Summary], evaluations: Sequence[Evaluation] = ()) -> Markup | None:
    """Old against new success: a drawing per policy of a bench, and per evaluation that says what was learned."""
    groups = grouped(rows)
    shown = [group for group in groups if group[0].role == "final"] or groups
    planes = [_plane(_title(group), [_of_summary(row) for row in group]) for group in shown]
    planes += [plane for evaluation in evaluations if (plane := _evaluation_plane(evaluation))]
    return part("figures", planes) if planes else None


def _title(rows: Sequence[Summary]) -> str:
    return f"{policy_name(rows[0].policy, rows[0].view)}, {'final' if rows[0].role == 'final' else 'tuning'} scenarios"


def _of_summary(row: Summary) -> _Method:
    return _Method(full_name(row), family_of(row.method).css, row.old_mean.value, row.new.value)


def _evaluation_plane(evaluation: Evaluation) -> Markup | None:
    """Means over old and over learned tasks; None if nothing was learned, or nothing is old."""
    new = [task for task in evaluation.tasks if task in evaluation.learned]
    old = [task for task in evaluation.tasks if task not in evaluation.learned]
    whole = [row for row in evaluation.rows if set(row.successes) == set(evaluation.tasks)]
    if not (new and old and whole):
        return None
    methods = [
        _Method(row.name, "before" if row is evaluation.rows[0] else "other", _mean(row, old), _mean(row, new))
        for row in whole
    ]
    return _plane(f"Checkpoints after {', '.join(new)}", methods)


def _mean(row: Row, tasks: Sequence[str]) -> float:
    return sum(map(row.rate, tasks)) / len(tasks)


def _plane(title: str, methods: Sequence[_Method]) -> Markup:
    axes = Axes(_UNIT, _UNIT, "success on old tasks (kept)", "success on the new task (learnt)", height=400.0)
    exact = [axes.at(method.old, method.new) for method in methods]
    badges = [
        _Badge(m.name, m.css, f"{m.name}: old {number(m.old)}, new {number(m.new)}", at, badge)
        for m, at, badge in zip(methods, exact, spread(exact, axes), strict=True)
    ]
    return part("plane", title, axes, badges, BADGE)


def drift_planes(runs: Sequence[Run], correlations: dict[str, Correlations]) -> Markup | None:
    """Drift against lost success, per run and per task, for each policy and kind of drift that was measured."""
    single = [run for run in runs if run.stages is None]
    present = {family_of(run.method) for run in single}
    parts: list[Markup] = []
    for policy, found in correlations.items():
        own = [run for run in single if policy_name(run.policy, run.view) == policy]
        figures = []
        for kind in _KINDS:
            per_run = found.action_per_run if kind == "action" else found.hidden_per_run
            per_task = found.action_per_task if kind == "action" else found.hidden_per_task
            figures.append(_scatter(policy, kind, "run", pairs_per_run(own, kind), per_run))
            figures.append(_scatter(policy, kind, "task", pairs_per_task(own, kind), per_task))
        if shown := [figure for figure in figures if figure is not None]:
            parts += [part("heading", policy), part("figures", shown)]
    legend = part("legend", [family for family in FAMILIES if family in present])
    return together([legend, *parts]) if parts else None


def _scatter(
    policy: str, kind: Kind, unit: str, pairs: Sequence[Pair], correlation: Correlation | None
) -> Markup | None:
    if not pairs:
        return None
    drifts = Scale.of([pair.drift for pair in pairs])
    x_title = f"{_KINDS[kind]}{', logarithmic' if drifts.log else ''}"
    lost = Scale.of([*(pair.lost for pair in pairs), 0.0, 1.0])
    axes = Axes(drifts, lost, x_title, f"old success lost per {unit}")
    dots = [(family_of(pair.run.method), axes.at(pair.drift, pair.lost), _tip(pair)) for pair in pairs]
    caption = f"{_KINDS[kind].capitalize()} per {unit}. {_describe(correlation, len(pairs))}"
    return part("scatter", f"{policy}: {caption}", caption, axes, dots, 4.0 if unit == "run" else 3.0)


def _describe(correlation: Correlation | None, n: int) -> str:
    """Spearman's rho in words."""
    if correlation is None:
        return f"No rank correlation can be had from {n} point{'' if n == 1 else 's'}."
    text = f"Spearman ρ\u00a0=\u00a0{number(correlation.rho)}"
    if correlation.low is not None and correlation.high is not None:
        text += f" [{number(correlation.low)}, {number(correlation.high)}]"
    return f"{text}, n\u00a0=\u00a0{correlation.n}."


def _tip(pair: Pair) -> str:
    run = pair.run
    return f"{run.label}, {run.scenario}, seed {run.seed}: drift {pair.drift:.3g}, lost {number(pair.lost)}"


def stage_curves(runs: Sequence[Run]) -> Markup | None:
    """Success after each stage of a sequence, a drawing per policy and scenario; None without sequences."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.stages is not None:
            groups.setdefault((policy_name(run.policy, run.view), run.scenario), []).append(run)
    drawn = [_stages(policy, scenario, group) for (policy, scenario), group in groups.items()]
    return part("figures", drawn) if drawn else None


def _stages(policy: str, scenario: str, runs: Sequence[Run]) -> Markup:
    stages = max(len(run.new_tasks) for run in runs)
    axes = Axes(
        Scale(0.0, stages * 1.08),  # with room for the numbers at the right end of the curves
        Scale(-0.02, 1.04),
        "tasks learnt",
        "success on tasks learnt so far",
        x_labels=((0.0, "before"), *((float(i), str(i)) for i in range(1, stages + 1))),
    )
    lines, keys = [], []
    for i, setting in enumerate(group_by_setting(runs)):
        family, name, means = family_of(setting[0].method), full_name(setting[0]), stage_means(setting)
        tips = [f"{name}: {mean:.2f} after {stage} tasks" for stage, mean in enumerate(means)]
        dashes = _DASHES[i % len(_DASHES)]
        lines.append(
            Line(list(enumerate(means)), f"curve {family.css}", dashes, str(i + 1), family.css, (family, tips))
        )
        keys.append((family.css, name))
    order = " → ".join(runs[0].new_tasks)
    caption = f"{policy}, {scenario}: mean success on the base tasks and those learnt so far, after each of {order}"
    return part("curves", caption, [(caption, axes, curves(axes, lines))], keys)


def stage_means(runs: Sequence[Run]) -> list[float]:
    """Mean success on the tasks known after each stage, over tasks and runs."""
    curves = []
    for run in runs:
        matrix = success_matrix(run)
        known = [matrix.base_tasks + matrix.new_tasks[:stage] for stage in range(len(matrix.after))]
        curves.append([sum(row[t] for t in tasks) / len(tasks) for row, tasks in zip(matrix.after, known, strict=True)])
    # Runs of one setting may have sequences of different lengths; each stage is the mean of those that reach it.
    longest = max(map(len, curves))
    reached = [[curve[i] for curve in curves if i < len(curve)] for i in range(longest)]
    return [sum(values) / len(values) for values in reached]


def filmstrips(strips: Sequence[Strip]) -> Markup | None:
    """Rollouts as strips of pictures, inside the page: the same prompt before, after plain, after CRaFT."""
    return together(
        part("film", strip.caption, [(_STAGES[s], base64.b64encode(png).decode()) for s, png in strip.pictures.items()])
        for strip in strips
    )
