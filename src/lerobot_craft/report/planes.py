"""Two planes: what was kept against what was learnt, and drift against what was lost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lerobot_craft.evaluation.correlation import Kind, Pair, pairs_per_run, pairs_per_task
from lerobot_craft.evaluation.matrix import Evaluation, Row
from lerobot_craft.evaluation.results import Correlation, Correlations, Run, Summary, policy_name
from lerobot_craft.evaluation.table import grouped, number
from lerobot_craft.report.families import FAMILIES, Family, family_of, full_name
from lerobot_craft.report.markup import Child, Markup, element, fragment
from lerobot_craft.report.plot import Axes, Scale, legend, marker

_UNIT = Scale(-0.04, 1.06)
_BADGE = 8.5  # radius of a numbered point
_KINDS: dict[Kind, str] = {"action": "drift of actions", "hidden": "drift of hidden states"}


@dataclass(frozen=True)
class _Point:
    """A method or a checkpoint in the plane."""

    name: str
    css: str
    old: float
    new: float


def retention_planes(rows: Sequence[Summary], evaluations: Sequence[Evaluation] = ()) -> Markup | None:
    """Old against new success: a drawing per policy of a bench, and per evaluation that says what was learned."""
    groups = grouped(rows)
    shown = [group for group in groups if group[0].role == "final"] or groups
    planes = [_plane(_title(group), [_of_summary(row) for row in group]) for group in shown]
    planes += [plane for evaluation in evaluations if (plane := _evaluation_plane(evaluation))]
    return element("div", planes, class_="figures") if planes else None


def _title(rows: Sequence[Summary]) -> str:
    return f"{policy_name(rows[0].policy, rows[0].view)}, {'final' if rows[0].role == 'final' else 'tuning'} scenarios"


def _of_summary(row: Summary) -> _Point:
    return _Point(full_name(row), family_of(row.method).css, row.old_mean.value, row.new.value)


def _evaluation_plane(evaluation: Evaluation) -> Markup | None:
    """Means over old and over learned tasks; None where nothing was learned, or nothing is old."""
    new = [task for task in evaluation.tasks if task in evaluation.learned]
    old = [task for task in evaluation.tasks if task not in evaluation.learned]
    whole = [row for row in evaluation.rows if set(row.successes) == set(evaluation.tasks)]
    if not (new and old and whole):
        return None
    points = [
        _Point(row.name, "before" if row is evaluation.rows[0] else "other", _mean(row, old), _mean(row, new))
        for row in whole
    ]
    return _plane(f"Checkpoints after {', '.join(new)}", points)


def _mean(row: Row, tasks: Sequence[str]) -> float:
    return sum(map(row.rate, tasks)) / len(tasks)


def _plane(title: str, points: Sequence[_Point]) -> Markup:
    axes = Axes(_UNIT, _UNIT, height=400.0)
    exact = [axes.at(point.old, point.new) for point in points]
    parts: list[Child] = [axes.frame("success on old tasks (kept)", "success on the new task (learnt)")]
    for i, (point, place, badge) in enumerate(zip(points, exact, spread(exact, axes), strict=True)):
        parts.append(_badge(i, point, place, badge))
    keys = [element("li", point.name, value=str(i), class_=point.css) for i, point in enumerate(points)]
    label = f"{title}: success on old tasks across, on the new task upwards; top right is best"
    return element(
        "figure",
        element("figcaption", title, ". Top right is best."),
        axes.draw(label, parts),
        element("ol", keys, start="0", class_="keys"),
    )


def spread(points: Sequence[tuple[float, float]], axes: Axes) -> list[tuple[float, float]]:
    """Places near the points where badges cover neither each other nor another point: the nearest, below first."""
    placed: list[tuple[float, float]] = []
    step = 2 * _BADGE + 1
    for i, (x, y) in enumerate(points):
        others = [point for j, point in enumerate(points) if j != i]
        offsets = sorted(
            ((dx * step / 2, dy * step / 2) for dx in range(-12, 13) for dy in range(-12, 25)),
            key=lambda o: (round(o[0] ** 2 + o[1] ** 2), -o[1], o[0]),
        )
        candidates = ((x + dx, y + dy) for dx, dy in offsets)
        inside = (c for c in candidates if _BADGE < c[0] < axes.width - _BADGE and c[1] > _BADGE)
        free = (c for c in inside if all(math.dist(c, other) >= step for other in placed))
        clear = (c for c in free if all(math.dist(c, other) > _BADGE + 2 for other in others))
        placed.append(next(clear, (x, y)))
    return placed


def _badge(index: int, shown: _Point, point: tuple[float, float], badge: tuple[float, float]) -> Markup:
    css = shown.css
    tip = f"{shown.name}: old {number(shown.old)}, new {number(shown.new)}"
    leader = None
    if badge != point:
        leader = element("line", x1=point[0], y1=point[1], x2=badge[0], y2=badge[1], class_="leader")
    return element(
        "g",
        element("title", tip),
        leader,
        element("circle", cx=point[0], cy=point[1], r=2.5, class_=f"mark {css}") if leader else None,
        element("circle", cx=badge[0], cy=badge[1], r=_BADGE, class_=f"badge {css}"),
        element("text", str(index), x=badge[0], y=badge[1] + 3.5, class_="badge-text", text_anchor="middle"),
    )


def drift_planes(runs: Sequence[Run], correlations: dict[str, Correlations]) -> Markup | None:
    """Drift against lost success, per run and per task, for each policy and kind of drift that was measured."""
    single = [run for run in runs if run.stages is None]
    present = {family_of(run.method) for run in single}
    parts: list[Child] = [legend([family for family in FAMILIES if family in present])]
    for policy, found in correlations.items():
        own = [run for run in single if policy_name(run.policy, run.view) == policy]
        figures = []
        for kind in _KINDS:
            per_run = found.action_per_run if kind == "action" else found.hidden_per_run
            per_task = found.action_per_task if kind == "action" else found.hidden_per_task
            figures.append(_scatter(policy, kind, "run", pairs_per_run(own, kind), per_run))
            figures.append(_scatter(policy, kind, "task", pairs_per_task(own, kind), per_task))
        if shown := [figure for figure in figures if figure is not None]:
            parts += [element("h3", policy), element("div", shown, class_="figures")]
    return fragment(*parts) if len(parts) > 1 else None


def _scatter(
    policy: str, kind: Kind, unit: str, pairs: Sequence[Pair], correlation: Correlation | None
) -> Markup | None:
    if not pairs:
        return None
    axes = Axes(Scale.of([pair.drift for pair in pairs]), Scale.of([*(pair.lost for pair in pairs), 0.0, 1.0]))
    dots = [
        marker(_family(pair), *axes.at(pair.drift, pair.lost), _tip(pair), size=4.0 if unit == "run" else 3.0)
        for pair in pairs
    ]
    said = describe(correlation, len(pairs))
    caption = f"{_KINDS[kind].capitalize()} per {unit}. {said}"
    scale = f"{_KINDS[kind]}{', logarithmic' if axes.x.log else ''}"
    frame = axes.frame(scale, f"old success lost per {unit}")
    return element("figure", element("figcaption", caption), axes.draw(f"{policy}: {caption}", frame, dots))


def describe(correlation: Correlation | None, n: int) -> str:
    """Spearman's rho in words."""
    if correlation is None:
        return f"No rank correlation can be had from {n} point{'' if n == 1 else 's'}."
    text = f"Spearman ρ\u00a0=\u00a0{number(correlation.rho)}"
    if correlation.low is not None and correlation.high is not None:
        text += f" [{number(correlation.low)}, {number(correlation.high)}]"
    return f"{text}, n\u00a0=\u00a0{correlation.n}."


def _family(pair: Pair) -> Family:
    return family_of(pair.run.method)


def _tip(pair: Pair) -> str:
    run = pair.run
    return f"{run.label}, {run.scenario}, seed {run.seed}: drift {pair.drift:.3g}, lost {number(pair.lost)}"
