"""Sections of trainings: drift, budget and multipliers over the steps, conflicts by module, costs."""

from collections.abc import Sequence
from statistics import median

from markupsafe import Markup

from lerobot_craft.io.text import decimal_bytes
from lerobot_craft.report.figures import Axes, Curve, Line, Point, Scale, colour, curves
from lerobot_craft.report.inputs import TrainingRun
from lerobot_craft.report.tables import Cell
from lerobot_craft.report.templates import part, together
from lerobot_craft.training.outcomes import NEAR, UNVERIFIED, Outcome

_MOST_POINTS = 240  # of a line: more cannot be seen on a page, and make a large file
_ROOM = 0.9  # of the largest value: a line that varies by less is drawn level
# Colours of the old tasks: the page's own, which people with any kind of colour vision can tell apart.
_COLOURS = ("craft", "plain", "replay", "other", "before")
_DASHES = (None, "7 4", "2 3")

_COS = "cos/"
_WHOLE = "all parameters"
_THRESHOLD = -0.1  # the default of --craft.conflict_threshold, for a run whose record is gone


def traces(runs: Sequence[TrainingRun]) -> Markup | None:
    """A table of what each run ended with, and two small drawings per run; None if no run has a drift."""
    shown = [run for run in runs if run.series("retention_loss")]
    if not shown:
        return None
    return together([_end_table(shown), part("figures", [_figure(run) for run in shown])])


def _end_table(runs: Sequence[TrainingRun]) -> Markup:
    rows = []
    for run in runs:
        whole, *tasks = run.outcomes
        mode = run.metrics[-1].get("mode")
        rows.append(
            [
                run.name,
                run.method if mode is None else f"{run.method}, {mode}",
                _progress(run),
                _number(whole.action_drift),
                _number(whole.drift),
                _number(run.epsilon),
                _verdict(run.epsilon, whole, tasks),
            ]
        )
    columns = ("run", "method", "step", "drift of the actions", "drift on trained anchors", "budget", "budget met")
    caption = (
        "At the end, or as far as a run has come. The drift of the actions decides where it was measured on real old "
        "frames that are kept out of training; else the budget is unverified. Drift on trained anchors is the mean of "
        "the last ten anchor steps over all old tasks."
    )
    return part("table", columns, rows, caption)


def _verdict(epsilon: float | None, whole: Outcome, tasks: Sequence[Outcome]) -> str:
    """Whether the drift of each old task, or of all if they share one budget, is within it."""
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
    caption = f"{run.name}. Budget met: {_verdict(run.epsilon, whole, outcomes)}."
    if run.record is not None and run.record.budget_unit is not None:
        caption += f" Drift: {run.record.budget_unit}."
    if (steps := _steps_per_point(run.series("retention_loss"))) > 1:
        caption += f" Each point is the mean of {steps} anchor steps."
    drift, multipliers = _lines(run, "retention_loss"), _lines(run, "lambda")
    if run.epsilon is not None:
        drift.append(Line(thinned(run.series("epsilon")), "trace budget", "6 4", "budget", "of-all"))
    drawings = [
        _drawing(run, "drift", "the drift of each old task, their mean, and the budget", drift),
        _drawing(run, "multiplier λ", "the multiplier of each old task, and their mean", multipliers),
    ]
    keys = [(_colour(i), _end_of(run, outcome)) for i, outcome in enumerate(outcomes)]
    return part("curves", caption, drawings, keys)


def _lines(run: TrainingRun, key: str) -> list[Line]:
    """A measure of each old task, and its mean over them."""
    lines = [
        Line(thinned(run.series(f"{key}/{task}")), f"trace {_colour(i)}", _dashes(i), str(i + 1), _colour(i))
        for i, task in enumerate(run.tasks)
    ]
    return [*lines, Line(thinned(run.series(key)), "trace mean", None, "mean", "of-all")]


def _drawing(run: TrainingRun, measure: str, what: str, lines: Sequence[Line]) -> tuple[str, Axes, list[Curve]]:
    scale = _scale([y for line in lines for _, y in line.values])
    steps = Scale(0.0, max(run.last_step * 1.13, 1.0))  # with room for the labels at the right end of the lines
    axes = Axes(steps, scale, "step", f"{measure}{', logarithmic' if scale.log else ''}", height=230.0)
    return f"{run.name}: {what}, over {run.last_step} steps", axes, curves(axes, lines)


def _scale(values: Sequence[float]) -> Scale:
    """Logarithmic if positive values span decades, whatever zeros there are; else never a narrow window."""
    positive = Scale.of([value for value in values if value > 0] or [0.0, 1.0])
    return positive if positive.log else Scale.of([*values, _ROOM * max(values)])


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Means of neighbours: at most `most` points."""
    size = _steps_per_point(points, most)
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]


def _steps_per_point(points: Sequence[Point], most: int = _MOST_POINTS) -> int:
    return max(-(-len(points) // most), 1)


def _end_of(run: TrainingRun, outcome: Outcome) -> str:
    """What became of one old task."""
    parts = [] if outcome.drift is None else [f"drift {_number(outcome.drift)}"]
    if multipliers := run.series(f"lambda/{outcome.task}"):
        parts.append(f"λ {_number(multipliers[-1][1])}")
    if outcome.action_drift is not None:
        parts.append(f"drift of the actions {_number(outcome.action_drift)}")
    if (said := outcome.verdict(run.epsilon)) is not None:
        parts.append(said)
    return f"{outcome.task}: {', '.join(parts)}"


def _progress(run: TrainingRun) -> str:
    if run.record is None or run.record.end_step == run.record.steps:
        return f"{run.last_step:,}"
    return f"{run.last_step:,} of {run.record.steps:,}"


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _dashes(index: int) -> str | None:
    return _DASHES[index // len(_COLOURS) % len(_DASHES)]


def _number(value: float | None) -> str:
    """Three significant digits."""
    return "-" if value is None else f"{value:.3g}"


def conflicts(runs: Sequence[TrainingRun]) -> Markup | None:
    """How often new task and retention conflict, by module: one table per set of modules, with a column per run."""
    groups: dict[tuple[str, ...], list[TrainingRun]] = {}
    for run in runs:
        if cosines(run, _WHOLE):
            groups.setdefault(modules_of(run), []).append(run)
    if not groups:
        return None
    note = (
        "Within one module a conflict is counted by the same cosine as over all parameters, where alone it makes craft "
        "project (use_grad_projection). Modules that the retention gradient does not reach have a dash."
    )
    grids = [_conflict_grid(modules, group) for modules, group in groups.items()]
    return together([*grids, part("paragraphs", [note], "about")])


def modules_of(run: TrainingRun) -> tuple[str, ...]:
    """Modules that the run compared gradients in."""
    keys = dict.fromkeys(key for row in run.modules for key in row if key.startswith(_COS))
    return tuple(key.removeprefix(_COS) for key in keys)


def cosines(run: TrainingRun, module: str) -> list[float]:
    """Cosines of the two gradients, at each anchor step that has both.

    At the first anchor step the student is the teacher and the retention gradient is zero. Modules have no cosine
    there, and the whole has exactly 0, which would count as a step without a conflict.
    """
    whole = {row["step"]: row["cos"] for row in run.steps if row.get("cos")}
    if module == _WHOLE:
        return list(whole.values())
    return [row[_COS + module] for row in run.modules if _COS + module in row and row["step"] in whole]


def _threshold_of(run: TrainingRun) -> float:
    """The cosine below which two gradients are in conflict."""
    return _THRESHOLD if run.record is None else run.record.conflict_threshold


def _conflict_grid(modules: Sequence[str], runs: Sequence[TrainingRun]) -> Markup:
    thresholds = ", ".join(dict.fromkeys(f"{_threshold_of(run):g}" for run in runs))
    caption = (
        f"How often new task and retention pull against each other: share of anchor steps whose two gradients have a "
        f"cosine below {thresholds}. The small number is the mean cosine over the same steps."
    )
    head = [Cell("module"), *(Cell(run.name, (_steps(len(cosines(run, _WHOLE))),)) for run in runs)]
    rows = [[Cell(module), *(_conflict_cell(run, module) for run in runs)] for module in (_WHOLE, *modules)]
    return part("grid", caption, head, rows)


def _conflict_cell(run: TrainingRun, module: str) -> Cell:
    found = cosines(run, module)
    if not found:
        return Cell("-")
    share = sum(cos < _threshold_of(run) for cos in found) / len(found)
    below = [f"{sum(found) / len(found):+.2f}"]
    if len(found) < len(cosines(run, _WHOLE)):  # not reached at every step: the column's n does not hold
        below.append(_steps(len(found)))
    return Cell(f"{share:.0%}", tuple(below), colour(1 - share))


def _steps(n: int) -> str:
    return f"n = {n:,} anchor step{'' if n == 1 else 's'}"


def training_costs(runs: Sequence[TrainingRun]) -> Markup | None:
    """A row per run; what was not recorded is a dash. None without runs."""
    if not runs:
        return None
    columns = ("run", "method", "s per step", "retention", "anchors", "anchor cache", "memory held", "peak", "GPU")
    caption = (
        "Retention is its share of the step, memory held is beyond plain fine-tuning, peak is of the whole process, "
        "GPU of steps with anchors. Seconds are the mean of the run's last process, or the median of logged steps "
        "where it did not come to its end."
    )
    return part("table", columns, [_cost_row(run) for run in runs], caption)


def seconds_per_step(run: TrainingRun) -> tuple[float | None, float | None]:
    """The whole step without waiting for data, and the method's part of it."""
    took = None if run.record is None else run.record.took
    if took is not None and took.steps:
        return (took.plain_s + took.extra_s) / took.steps, took.extra_s / took.steps
    whole, own = ([row[key] for row in run.metrics if key in row] for key in ("update_s", "retention_s"))
    # Retention is logged at anchor steps only: if some steps have none, its median is no mean over steps.
    return (median(whole) if whole else None), (median(own) if own and len(own) == len(whole) else None)


def _cost_row(run: TrainingRun) -> list[str]:
    record = run.record
    whole, own = seconds_per_step(run)
    anchors = None if record is None else record.anchors
    took = None if record is None else record.took
    return [
        run.name,
        run.method,
        _number(whole),
        "-" if whole is None or own is None or whole == 0 else f"{own / whole:.0%}",
        "-" if anchors is None else f"{anchors.number:,} ({anchors.source})",
        "-" if anchors is None else decimal_bytes(anchors.bytes),
        "-" if record is None else decimal_bytes(sum(cost.bytes for cost in record.costs)),
        "-" if took is None or took.process_bytes is None else decimal_bytes(took.process_bytes),
        "-" if took is None or took.gpu_anchors_bytes is None else decimal_bytes(took.gpu_anchors_bytes),
    ]
