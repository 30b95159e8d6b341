"""The page's tables: the summary with interval bars, comparisons with replay, what each method costs."""

from collections.abc import Sequence

from lerobot_craft.evaluation.comparison import Comparison
from lerobot_craft.evaluation.results import Estimate, Role, Summary, policy_name
from lerobot_craft.evaluation.summary import BASE
from lerobot_craft.evaluation.table import (
    AGAINST_PLAIN,
    KEPT,
    columns_of,
    design,
    format_estimate,
    given,
    given_to,
    grouped,
    name_of,
    number,
)
from lerobot_craft.report.families import Family, family_of
from lerobot_craft.report.markup import Child, Markup, element, foreground, fragment

ROLES: dict[Role, str] = {
    "final": "scenarios kept for the final table",
    "tuning": "scenarios on which settings were chosen",
}
_BAR, _BAR_HEIGHT = 120.0, 14.0


def table(columns: Sequence[str], rows: Sequence[Sequence[Child]], caption: str) -> Markup:
    """A table whose first column names its row; on a narrow screen each row becomes a card.

    Cards are no longer laid out as a table, and browsers then forget that they are one: the roles say it again.
    """
    head = element("tr", [element("th", column, scope="col", role="columnheader") for column in columns], role="row")
    parts = (
        element("caption", caption),
        element("thead", head, role="rowgroup"),
        element("tbody", [_card(columns, row) for row in rows], role="rowgroup"),
    )
    return element("table", *parts, class_="cards", role="table")


def _card(columns: Sequence[str], row: Sequence[Child]) -> Markup:
    cells = [
        element("td", cell, data_label=column, role="cell") for column, cell in zip(columns[1:], row[1:], strict=True)
    ]
    return element("tr", element("th", row[0], scope="row", role="rowheader"), cells, role="row")


def main_tables(rows: Sequence[Summary]) -> Markup:
    """What is left of the old tasks and what was learnt, one table per policy, view and role."""
    tables = [(group[0].role, _main_table(group)) for group in grouped(rows)]
    final, tuning = (fragment(*(made for role, made in tables if role == wanted)) for wanted in ("final", "tuning"))
    return foreground(final, tuning)


def _main_table(rows: Sequence[Summary]) -> Markup:
    first = rows[0]
    columns = columns_of(rows)
    body: list[list[Child]] = []
    for i, row in enumerate(rows):
        number_and_name = element("span", str(i), class_="index"), element("span", name_of(row.label, row.knob))
        name = element("span", *number_and_name, class_="named")
        shown = [_shown(column, of(row), family_of(row.method)) for column, of in columns.items()]
        body.append([name, given(row), *shown])
    return fragment(
        element("h3", f"{policy_name(first.policy, first.view)}: {ROLES[first.role]}"),
        table(("method", "the user has", *columns), body, design(rows)),
    )


def _shown(column: str, found: Estimate | str | None, family: Family) -> Child:
    """A rate with a bar, a ratio or a difference in numbers alone: those do not go from 0 to 1."""
    if found is None or isinstance(found, str):
        return "-" if found is None else found
    if column == AGAINST_PLAIN:
        return signed(found)
    return numbers(found) if column == KEPT else with_bar(found, family)


def with_bar(estimate: Estimate, family: Family) -> Markup:
    """A rate, its interval in numbers, and both on a bar from 0 to 1."""
    return element("span", _bar(estimate, family), numbers(estimate), class_="measure")


def numbers(estimate: Estimate) -> Markup:
    """The value and, smaller, its interval."""
    interval = None
    if estimate.low is not None and estimate.high is not None:
        interval = element("small", f"{number(estimate.low)} to {number(estimate.high)}")
    return element("span", element("b", number(estimate.value)), interval)


def _bar(estimate: Estimate, family: Family) -> Markup:
    middle = _BAR_HEIGHT / 2
    inner = _BAR - 8

    def x(value: float) -> float:
        return 4 + inner * min(max(value, 0.0), 1.0)

    parts: list[Child] = [element("line", x1=x(0), x2=x(1), y1=middle, y2=middle, class_="track")]
    if estimate.low is not None and estimate.high is not None:
        span = {"x1": x(estimate.low), "x2": x(estimate.high), "y1": middle, "y2": middle}
        parts.append(element("line", class_=f"span {family.css}", **span))
    parts.append(element("circle", cx=x(estimate.value), cy=middle, r=2.8, class_=f"mark {family.css}"))
    # The numbers stand beside it: a reader's software need not say them twice.
    return element("svg", parts, viewBox=f"0 0 {_BAR:g} {_BAR_HEIGHT:g}", class_="bar", aria_hidden="true")


def comparison_table(comparisons: Sequence[Comparison]) -> Markup | None:
    """Differences to replay with the same of the old tasks, on final scenarios unless there are none."""
    if not comparisons:
        return None
    shown = [row for row in comparisons if row.role == "final"] or comparisons
    body: list[list[Child]] = [
        [
            f"{row.label} − {row.reference}",
            policy_name(row.policy, row.view),
            given_to(row),
            signed(row.old_mean),
            signed(row.new),
            str(row.n_pairs),
        ]
        for row in shown
    ]
    columns = ("difference", "policy", "both have", "old tasks", "new task", "pairs of runs")
    caption = (
        "Success of the method minus success of the reference, paired by base policy, and by start state where single "
        "episodes are known."
    )
    return table(columns, body, caption)


def signed(estimate: Estimate) -> Markup:
    """A difference with its sign and interval."""
    sign = "+" if estimate.value > 0 and number(estimate.value) != "0.00" else ""
    interval = format_estimate(estimate).partition(" ")[2].strip("[]").replace(", ", " to ")
    return element("span", element("b", sign + number(estimate.value)), element("small", interval))


def cost_table(rows: Sequence[Summary]) -> Markup | None:
    """Time and bytes of each method, on final scenarios unless there are none; None where nothing was trained."""
    trained = [row for row in rows if row.method != BASE]
    shown = [row for row in trained if row.role == "final"] or trained
    if not shown:
        return None
    body: list[list[Child]] = [
        [
            name_of(row.label, row.knob),
            policy_name(row.policy, row.view),
            given(row),
            "-" if row.train_seconds is None else duration(row.train_seconds),
            "-" if row.step_overhead is None else f"{row.step_overhead:.2f}×",
            size(row.bytes),
            size(row.cached_bytes),
        ]
        for row in shown
    ]
    columns = ("method", "policy", "the user has", "training", "step time", "old data", "anchor cache")
    caption = "Means over runs. Step time is against plain fine-tuning; old data is what must still be there to train."
    return table(columns, body, caption)


def size(count: float) -> str:
    """Bytes in decimal units, as disks are sold."""
    if not count:
        return "0"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("the last unit takes everything")


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, with about two digits."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
