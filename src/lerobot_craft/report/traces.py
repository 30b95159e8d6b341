"""Drift, budget and multipliers over the steps of each training, and whether the budget was met at its end."""

from collections.abc import Sequence
from dataclasses import dataclass

from lerobot_craft.report.markup import Child, Markup, element, fragment
from lerobot_craft.report.plot import Axes, Scale
from lerobot_craft.report.sequences import apart
from lerobot_craft.report.tables import table
from lerobot_craft.report.training_runs import TrainingRun
from lerobot_craft.training.records.outcomes import NEAR, UNVERIFIED, Outcome

_MOST_POINTS = 240  # of a line: more are not seen on a page, and make a large file
_ROOM = 0.9  # of the largest value: what varies by less is drawn as the level line that it is
# Colours of the old tasks: the page's own, which can be told apart by every kind of colour vision.
_COLOURS = ("craft", "plain", "replay", "other", "before")
_DASHES = (None, "7 4", "2 3")

type Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Line:
    """What a drawing shows of one measure: its points, its CSS classes, and a number at its end."""

    points: Points
    css: str
    dashes: str | None = None
    end: str = ""
    end_css: str = ""


def traces(runs: Sequence[TrainingRun]) -> Markup | None:
    """A table of what each run ended with, and two small drawings per run; None where no run has a drift."""
    shown = [run for run in runs if run.series("retention_loss")]
    if not shown:
        return None
    figures = [_figure(run) for run in shown]
    return fragment(_end_table(shown), element("div", figures, class_="figures"))


def _end_table(runs: Sequence[TrainingRun]) -> Markup:
    rows: list[list[Child]] = []
    for run in runs:
        whole, *tasks = run.outcomes
        rows.append(
            [
                run.name,
                _mode(run),
                _progress(run),
                "-" if whole.action_drift is None else _number(whole.action_drift),
                "-" if whole.drift is None else _number(whole.drift),
                "-" if run.epsilon is None else _number(run.epsilon),
                verdict(run.epsilon, whole, tasks),
            ]
        )
    columns = ("run", "method", "step", "drift of the actions", "drift on trained anchors", "budget", "budget met")
    caption = (
        "At the end, or as far as a run has come. The drift of the actions decides where it was measured on real old "
        "frames that are kept out of training; else the budget is unverified. Drift on trained anchors is the mean of "
        "the last ten anchor steps over all old tasks."
    )
    return table(columns, rows, caption)


def verdict(epsilon: float | None, whole: Outcome, tasks: Sequence[Outcome]) -> str:
    """Whether the drift of each old task, or of all where they have one budget in common, is within it."""
    judged = [task for task in tasks if task.verdict(epsilon) is not None] or [whole]
    if all(outcome.verdict(epsilon) is None for outcome in judged):
        return "no budget"
    if over := sum(outcome.is_over(epsilon) for outcome in judged):
        return "no" if len(judged) == 1 else f"no: {over} of {len(judged)} tasks are over it"
    if not all(outcome.verified for outcome in judged):
        return UNVERIFIED
    near = sum(outcome.verdict(epsilon) == NEAR for outcome in judged)
    return f"yes; {near} of {len(judged)} tasks too near to tell" if near else "yes"


def _figure(run: TrainingRun) -> Markup:
    whole, *outcomes = run.outcomes
    caption = f"{run.name}. Budget met: {verdict(run.epsilon, whole, outcomes)}."
    if run.record is not None and run.record.budget_unit is not None:
        caption += f" Drift: {run.record.budget_unit}."
    if (together := _together(run)) > 1:
        caption += f" Each point is the mean of {together} anchor steps."
    keys = [
        element("li", element("span", _fate(run, outcome)), class_=_colour(i)) for i, outcome in enumerate(outcomes)
    ]
    return element(
        "figure",
        element("figcaption", caption),
        _drift(run),
        _multipliers(run),
        element("ol", keys, class_="keys") if keys else None,
    )


def _drift(run: TrainingRun) -> Markup:
    lines = [
        _Line(thinned(run.series(f"retention_loss/{task}")), f"trace {_colour(i)}", _dashes(i), str(i + 1), _colour(i))
        for i, task in enumerate(run.tasks)
    ]
    lines.append(_Line(thinned(run.series("retention_loss")), "trace mean", end="mean"))
    if run.epsilon is not None:
        lines.append(_Line(thinned(run.series("epsilon")), "trace budget", "6 4", end="budget"))
    return _drawing(run, "drift", "the drift of each old task, their mean, and the budget", lines)


def _multipliers(run: TrainingRun) -> Markup:
    lines = [
        _Line(thinned(run.series(f"lambda/{task}")), f"trace {_colour(i)}", _dashes(i), str(i + 1), _colour(i))
        for i, task in enumerate(run.tasks)
    ]
    lines.append(_Line(thinned(run.series("lambda")), "trace mean", end="mean"))
    return _drawing(run, "multiplier λ", "the multiplier of each old task, and their mean", lines)


def _drawing(run: TrainingRun, measure: str, what: str, lines: Sequence[_Line]) -> Markup:
    drawn = [line for line in lines if line.points]
    scale = _scale([y for line in drawn for _, y in line.points])
    # Names stand at the right end of their lines, so the drawing keeps room for them there.
    axes = Axes(Scale(0.0, max(run.last_step * 1.13, 1.0)), scale, height=230.0)
    parts: list[Child] = [axes.frame("step", f"{measure}{', logarithmic' if scale.log else ''}")]
    ends = []
    for line in drawn:
        points = [axes.at(x, y) for x, y in line.points if y > 0 or not scale.log]
        if points:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            parts.append(element("path", d=path, class_=line.css, stroke_dasharray=line.dashes))
            ends.append((points[-1][1], points[-1][0], line))
    ends.sort(key=lambda end: end[0])
    for height, (_, x, line) in zip(apart([end[0] for end in ends]), ends, strict=True):
        parts.append(element("text", line.end, x=x + 5, y=height + 4, class_=f"end {line.end_css or 'of-all'}"))
    return axes.draw(f"{run.name}: {what}, over {run.last_step} steps", parts)


def _scale(values: Sequence[float]) -> Scale:
    """Logarithmic where positive values span decades, whatever is zero beside them; else never a narrow window."""
    positive = Scale.of([value for value in values if value > 0] or [0.0, 1.0])
    return positive if positive.log else Scale.of([*values, _ROOM * max(values)])


def thinned(points: Points, most: int = _MOST_POINTS) -> list[tuple[float, float]]:
    """Means of as many neighbours as it takes to have at most `most` points."""
    size = -(-len(points) // most) if points else 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _together(run: TrainingRun) -> int:
    return -(-len(run.series("retention_loss")) // _MOST_POINTS)


def _fate(run: TrainingRun, outcome: Outcome) -> str:
    parts = [] if outcome.drift is None else [f"drift {_number(outcome.drift)}"]
    if multipliers := run.series(f"lambda/{outcome.task}"):
        parts.append(f"λ {_number(multipliers[-1][1])}")
    if outcome.action_drift is not None:
        parts.append(f"drift of the actions {_number(outcome.action_drift)}")
    if (said := outcome.verdict(run.epsilon)) is not None:
        parts.append(said)
    return f"{outcome.task}: {', '.join(parts)}"


def _mode(run: TrainingRun) -> str:
    mode = run.metrics[-1].get("mode")
    return run.method if mode is None else f"{run.method}, {mode}"


def _progress(run: TrainingRun) -> str:
    if run.record is None or run.record.end_step == run.record.steps:
        return f"{run.last_step:,}"
    return f"{run.last_step:,} of {run.record.steps:,}"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _dashes(index: int) -> str | None:
    return _DASHES[index // len(_COLOURS) % len(_DASHES)]


def _number(value: float) -> str:
    """Three digits that say something."""
    return f"{value:.3g}"
