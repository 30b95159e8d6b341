"""Sequences of tasks: success stage by stage, and LIBERO's scores."""

from collections.abc import Sequence

from lerobot_craft.evaluation.results import Run, SequenceSummary, policy_name
from lerobot_craft.evaluation.summary import group_by_setting, success_matrix
from lerobot_craft.evaluation.table import given_to, grouped, name_of, sample_size
from lerobot_craft.report.families import family_of, full_name
from lerobot_craft.report.markup import Child, Markup, element, fragment
from lerobot_craft.report.plot import Axes, Scale, marker
from lerobot_craft.report.tables import ROLES, numbers, table

_DASHES = (None, "7 4", "2 4", "9 3 2 3", "12 4")
_LABEL_GAP = 13.0


def sequences(runs: Sequence[Run], rows: Sequence[SequenceSummary]) -> Markup | None:
    """Curves and scores of the runs over sequences; None without any."""
    chosen = [run for run in runs if run.stages is not None]
    if not chosen:
        return None
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in chosen:
        groups.setdefault((policy_name(run.policy, run.view), run.scenario), []).append(run)
    curves = [_curves(policy, scenario, group) for (policy, scenario), group in groups.items()]
    return fragment(*(_scores(group) for group in grouped(rows)), element("div", curves, class_="figures"))


def _scores(rows: Sequence[SequenceSummary]) -> Markup:
    columns = (
        "method",
        "the user has per old task",
        "NBT, all tasks",
        "NBT, new tasks",
        "AUC, all tasks",
        "AUC, new tasks",
        "FWT",
        "base tasks at the end",
    )
    body: list[list[Child]] = []
    for row in rows:
        scores = (row.nbt_all, row.nbt_new, row.auc_all, row.auc_new, row.fwt_new, row.final_base)
        cells = [numbers(score) if score else "-" for score in scores]
        body.append([name_of(row.label, row.knob), given_to(row), *cells])
    title = f"{policy_name(rows[0].policy, rows[0].view)}, sequences: {ROLES[rows[0].role]}"
    return fragment(element("h3", title), table(columns, body, sample_size(rows)))


def _curves(policy: str, scenario: str, runs: Sequence[Run]) -> Markup:
    stages = max(len(run.new_tasks) for run in runs)
    # Numbers stand at the right end of their lines, so the drawing keeps room for them there.
    axes = Axes(Scale(0.0, stages * 1.08), Scale(-0.02, 1.04))
    names = {0.0: "before"} | {float(i): str(i) for i in range(1, stages + 1)}
    settings = group_by_setting(runs)
    curves = [stage_means(setting) for setting in settings]
    parts: list[Child] = [axes.frame("tasks learnt", "success on tasks learnt so far", names)]
    parts += [
        _curve(axes, i, setting[0], curve) for i, (setting, curve) in enumerate(zip(settings, curves, strict=True))
    ]
    ends = sorted((*axes.at(len(curve) - 1, curve[-1])[::-1], i) for i, curve in enumerate(curves))
    for height, (_, x, i) in zip(apart([end[0] for end in ends]), ends, strict=True):
        css = family_of(settings[i][0].method).css
        parts.append(element("text", str(i + 1), x=x + 9, y=height + 4, class_=f"end {css}"))
    keys = [element("li", full_name(setting[0]), class_=family_of(setting[0].method).css) for setting in settings]
    order = " → ".join(runs[0].new_tasks)
    caption = f"{policy}, {scenario}: mean success on the base tasks and those learnt so far, after each of {order}"
    drawing = axes.draw(caption, parts)
    return element("figure", element("figcaption", caption), drawing, element("ol", keys, class_="keys"))


def _curve(axes: Axes, index: int, run: Run, heights: Sequence[float]) -> Markup:
    family = family_of(run.method)
    points = [axes.at(stage, height) for stage, height in enumerate(heights)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    marks = [
        marker(family, *point, f"{full_name(run)}: {height:.2f} after {stage} tasks", size=3.5)
        for stage, (point, height) in enumerate(zip(points, heights, strict=True))
    ]
    dashes = _DASHES[index % len(_DASHES)]
    return fragment(element("path", d=path, class_=f"curve {family.css}", stroke_dasharray=dashes), marks)


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


def apart(heights: Sequence[float]) -> list[float]:
    """Heights in order, moved down just enough that labels do not touch."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + _LABEL_GAP) if placed else height)
    return placed
