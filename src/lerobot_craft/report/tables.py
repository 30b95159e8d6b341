"""The page's tables: what was kept and learnt, comparisons, costs, and success task by task in colours."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from lerobot_craft.evaluation.intervals import CONFIDENCE
from lerobot_craft.evaluation.listening import Listening
from lerobot_craft.evaluation.matrix import CONVENTIONS, Evaluation, Row, rate_of, sequence_scores
from lerobot_craft.evaluation.results import Estimate, Role, Run, SequenceSummary, Summary, policy_name
from lerobot_craft.evaluation.summary import BASE, BASE_LABEL, group_by_setting, rate, task_cells
from lerobot_craft.evaluation.table import (
    AGAINST_PLAIN,
    KEPT,
    Comparison,
    columns_of,
    design,
    format_estimate,
    given,
    given_to,
    grouped,
    name_of,
    number,
    sample_size,
)
from lerobot_craft.io.text import decimal_bytes, duration
from lerobot_craft.report.figures import colour, family_of, full_name
from lerobot_craft.report.templates import Child, foreground, part, together

_ROLES: dict[Role, str] = {
    "final": "scenarios kept for the final table",
    "tuning": "scenarios on which settings were chosen",
}


def main_tables(rows: Sequence[Summary]) -> Markup | None:
    """What is left of the old tasks and what was learnt, one table per policy, view and role."""
    tables = [(group[0].role, _main_table(group)) for group in grouped(rows)]
    final, tuning = (together(made for role, made in tables if role == wanted) for wanted in ("final", "tuning"))
    return foreground(final, tuning)


def _main_table(rows: Sequence[Summary]) -> Markup | None:
    first = rows[0]
    columns = columns_of(rows)
    body: list[list[Child]] = []
    for i, row in enumerate(rows):
        name = part("named", i, name_of(row.label, row.knob))
        shown = [_shown(column, of(row), family_of(row.method).css) for column, of in columns.items()]
        body.append([name, given(row), *shown])
    return together(
        [
            part("heading", f"{policy_name(first.policy, first.view)}: {_ROLES[first.role]}"),
            part("table", ("method", "the user has", *columns), body, design(rows)),
        ]
    )


def _shown(column: str, found: Estimate | str | None, css: str) -> Child:
    """A rate with a bar; a ratio or a difference in numbers only, since it does not go from 0 to 1."""
    if found is None or isinstance(found, str):
        return "-" if found is None else found
    if column == AGAINST_PLAIN:
        return _signed(found)
    return _numbers(found) if column == KEPT else part("measure", _Bar(found), css, _numbers(found))


@dataclass(frozen=True)
class _Bar:
    """A rate and its interval on a bar from 0 to 1."""

    estimate: Estimate
    width: float = 120.0
    height: float = 14.0
    middle: float = 7.0

    def x(self, value: float) -> float:
        return 4 + (self.width - 8) * min(max(value, 0.0), 1.0)


def _numbers(estimate: Estimate) -> Markup:
    """The value and, smaller, its interval."""
    return part("numbers", number(estimate.value), _interval(estimate))


def _interval(estimate: Estimate) -> str | None:
    if estimate.low is None or estimate.high is None:
        return None
    return f"{number(estimate.low)} to {number(estimate.high)}"


def _signed(estimate: Estimate) -> Markup:
    """A difference with its sign and interval."""
    sign = "+" if estimate.value > 0 and number(estimate.value) != "0.00" else ""
    interval = format_estimate(estimate).partition(" ")[2].strip("[]").replace(", ", " to ")
    return part("numbers", sign + number(estimate.value), interval)


def comparison_table(comparisons: Sequence[Comparison]) -> Markup | None:
    """Differences to replay with the same old frames, on final scenarios unless there are none."""
    if not comparisons:
        return None
    shown = [row for row in comparisons if row.role == "final"] or comparisons
    body: list[list[Child]] = [
        [
            f"{row.label} − {row.reference}",
            policy_name(row.policy, row.view),
            given_to(row),
            _signed(row.old_mean),
            _signed(row.new),
            str(row.n_pairs),
        ]
        for row in shown
    ]
    columns = ("difference", "policy", "both have", "old tasks", "new task", "pairs of runs")
    caption = (
        "Success of the method minus success of the reference, paired by base policy, and by start state where single "
        "episodes are known."
    )
    return part("table", columns, body, caption)


def sequence_tables(rows: Sequence[SequenceSummary]) -> Markup | None:
    """LIBERO's scores of runs over sequences, one table per policy, view and role."""
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
    parts = []
    for group in grouped(rows):
        body: list[list[Child]] = []
        for row in group:
            scores = (row.nbt_all, row.nbt_new, row.auc_all, row.auc_new, row.fwt_new, row.final_base)
            cells = [_numbers(score) if score else "-" for score in scores]
            body.append([name_of(row.label, row.knob), given_to(row), *cells])
        title = f"{policy_name(group[0].policy, group[0].view)}, sequences: {_ROLES[group[0].role]}"
        parts += [part("heading", title), part("table", columns, body, sample_size(group))]
    return together(parts)


def cost_table(rows: Sequence[Summary]) -> Markup | None:
    """Time and bytes of each method, on final scenarios unless there are none; None if nothing was trained."""
    trained = [row for row in rows if row.method != BASE]
    shown = [row for row in trained if row.role == "final"] or trained
    if not shown:
        return None
    body = [
        [
            name_of(row.label, row.knob),
            policy_name(row.policy, row.view),
            given(row),
            "-" if row.train_seconds is None else duration(row.train_seconds),
            "-" if row.step_overhead is None else f"{row.step_overhead:.2f}×",
            decimal_bytes(row.bytes),
            decimal_bytes(row.cached_bytes),
        ]
        for row in shown
    ]
    columns = ("method", "policy", "the user has", "training", "step time", "old data", "anchor cache")
    caption = "Means over runs. Step time is against plain fine-tuning; old data is what must still be there to train."
    return part("table", columns, body, caption)


class Cell(NamedTuple):
    """A cell of a coloured table: its text, smaller lines below, and its colour."""

    text: str
    below: tuple[str, ...] = ()
    colour: str | None = None


def heatmaps(runs: Sequence[Run]) -> Markup | None:
    """Success on every task, one table per policy and scenario, means over seeds; None without runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((policy_name(run.policy, run.view), run.scenario), []).append(run)
    parts: dict[Role, list[Markup]] = {"final": [], "tuning": []}
    for (policy, scenario), group in groups.items():
        parts[group[0].role].append(_heatmap(policy, scenario, group))
    return foreground(together(parts["final"]), together(parts["tuning"]))


def _heatmap(policy: str, scenario: str, runs: Sequence[Run]) -> Markup:
    first = runs[0]
    # Tasks in the new task's scene come first: they tell most, and a phone shows the first columns.
    near = [*first.same_scene, *first.new_tasks]
    tasks = [*near, *first.elsewhere] if first.same_scene else [*first.elsewhere, *near]
    bases = list({run.seed: run for run in runs}.values())
    rows = [_heatmap_row(BASE_LABEL, tasks, bases, before=True)]
    rows += [_heatmap_row(full_name(group[0]), tasks, group) for group in group_by_setting(runs)]
    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    caption = f"{policy}, {scenario}: mean over seeds ({seeds}), n = {episodes_of(runs)} episodes per task and run"
    caption += f"; below each rate its {CONFIDENCE:.0%} interval"
    return part("grid", caption, [Cell("method"), *(Cell(task, (_mark(first, task),)) for task in tasks)], rows)


def _heatmap_row(label: str, tasks: Sequence[str], runs: Sequence[Run], *, before: bool = False) -> list[Cell]:
    n = min(run.n_episodes for run in runs)
    found = [task_cells(runs, task, before=before) for task in tasks]
    return [Cell(label), *(_rate_cell(rate(cells, n, before=before)) if cells else Cell("-") for cells in found)]


def _mark(run: Run, task: str) -> str:
    if task in run.new_tasks:
        return "new"
    return "same scene" if task in run.same_scene else "old"


def episodes_of(runs: Sequence[Run]) -> str:
    """The number of episodes per task, or its range."""
    counts = sorted({run.n_episodes for run in runs})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _rate_cell(estimate: Estimate) -> Cell:
    """A cell in the colour of its rate, with the interval below."""
    interval = _interval(estimate)
    return Cell(number(estimate.value), (interval,) if interval else (), colour(estimate.value))


def success_grid(evaluation: Evaluation) -> Markup:
    """Success of checkpoints with intervals: a row per checkpoint, a column per task."""
    caption = (
        f"{evaluation.env['type']}: n = {evaluation.n_episodes} episodes per task, the same start states for all "
        f"(seed {evaluation.seed}); below each rate its {CONFIDENCE:.0%} interval (Wilson)"
    )
    rows = [[Cell(row.name), *(_success(row, task) for task in evaluation.tasks)] for row in evaluation.rows]
    return part("grid", caption, [Cell(name) for name in ("checkpoint", *evaluation.tasks)], rows)


def _success(row: Row, task: str) -> Cell:
    found = rate_of(row, task)
    return Cell("-") if found is None else _rate_cell(found)


def score_table(evaluation: Evaluation) -> Markup | None:
    """Scores of a sequence; None if the checkpoints are not a sequence."""
    scores = sequence_scores(evaluation)
    if not scores:
        return None
    caption = f"learned one after the other: {', '.join(evaluation.learned)}"
    rows = [[name, f"{number(score.value)} ± {number(score.error)}"] for name, score in scores]
    table = part("table", ["score", "value ± standard error"], rows, caption)
    return together([table, part("paragraphs", [CONVENTIONS], None)])


def checkpoint_table(evaluation: Evaluation) -> Markup:
    """Where each checkpoint was found."""
    rows = [[row.name, row.checkpoint] for row in evaluation.rows]
    return part("table", ["name", "checkpoint"], rows, "where they were found")


def listening_grid(found: Listening) -> Markup | None:
    """What is left of the difference between every two instructions: blue is kept, orange is gone."""
    caption = (
        f"What is left of the difference between two instructions: 1 is all of it, 0 is the same movement "
        f"under both, a dash cannot be told apart. {found.frames} frames of {found.episodes} episodes of "
        f"{found.dataset}, each under every instruction; below each share its {CONFIDENCE:.0%} interval over episodes"
    )
    names = [Cell(name, ("learned",) if name in found.learned else ()) for name in found.instructions]
    rows = [[name, *map(_left, row)] for name, row in zip(names, found.gone, strict=True)]
    drawn = part("grid", caption, [Cell("told"), *names], rows)
    return together([part("paragraphs", found.sentences(), "headline"), drawn])


def _left(gone: Estimate | None) -> Cell:
    if gone is None:
        return Cell("-")
    left = 1 - gone.value
    interval = None
    if gone.low is not None and gone.high is not None:
        interval = f"{number(1 - gone.high)} to {number(1 - gone.low)}"
    return Cell(number(left), (interval,) if interval else (), colour(min(max(left, 0.0), 1.0)))


def apart_table(found: Listening) -> Markup:
    """How far instructions are told apart: if each had been kept, and now."""
    rows = []
    for i, name in enumerate(found.instructions):
        for j, other in enumerate(found.instructions):
            if i != j and name not in found.learned:
                rows.append([name, other, number(found.apart_if_kept[i][j]), number(found.apart_now[i][j])])
    caption = (
        "root mean square over frames, steps and dimensions, in standard deviations of the actions that the policy "
        f"before was trained on; under other noise it varies by {number(max(found.variation))} at most"
    )
    return part("table", ["told", "or told", "had it been kept", "now"], rows, caption)
