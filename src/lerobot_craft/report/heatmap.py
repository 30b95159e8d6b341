"""Success of every method on every task, as coloured tables that can also be read without colour."""

from collections.abc import Sequence

from lerobot_craft.evaluation.intervals import CONFIDENCE
from lerobot_craft.evaluation.results import Estimate, Role, Run, policy_name
from lerobot_craft.evaluation.summary import BASE_LABEL, group_by_setting, rate, task_cells
from lerobot_craft.evaluation.table import number
from lerobot_craft.report.families import full_name
from lerobot_craft.report.markup import Child, Markup, element, foreground, fragment

# From lost to kept. Every kind of colour vision tells orange from blue, and both are light enough for dark text.
_LOST, _MIDDLE, _KEPT = (243, 164, 112), (246, 243, 238), (125, 190, 226)


def heatmaps(runs: Sequence[Run]) -> Markup | None:
    """One table per policy and scenario, means over seeds; None without runs."""
    groups: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((policy_name(run.policy, run.view), run.scenario), []).append(run)
    if not groups:
        return None
    parts: dict[Role, list[Markup]] = {"final": [], "tuning": []}
    for (policy, scenario), group in groups.items():
        parts[group[0].role].append(_heatmap(policy, scenario, group))
    return foreground(fragment(parts["final"]), fragment(parts["tuning"]))


def _heatmap(policy: str, scenario: str, runs: Sequence[Run]) -> Markup:
    first = runs[0]
    # What shares the new task's scene comes first: it tells most, and a phone shows the first columns.
    near = [*first.same_scene, *first.new_tasks]
    tasks = [*near, *first.elsewhere] if first.same_scene else [*first.elsewhere, *near]
    head = [element("th", task, *_mark(first, task), scope="col") for task in tasks]
    bases = list({run.seed: run for run in runs}.values())
    rows = [_row(BASE_LABEL, tasks, bases, before=True)]
    rows += [_row(full_name(group[0]), tasks, group) for group in group_by_setting(runs)]
    caption = f"{policy}, {scenario}: mean over seeds ({_seeds(runs)}), n = {_episodes(runs)} episodes per task and run"
    caption += f"; below each rate its {CONFIDENCE:.0%} interval"
    return grid(caption, [element("th", "method", scope="col"), *head], rows)


def grid(caption: str, head: Sequence[Markup], rows: Sequence[Markup]) -> Markup:
    """A table of coloured cells with what it is about above."""
    drawn = element("table", element("thead", element("tr", head)), element("tbody", rows), class_="heat")
    # Wider than a phone: the table scrolls by itself, by keyboard too, and what it is about stays.
    scrolled = element("div", drawn, class_="wide", tabindex="0", role="region", aria_label=caption)
    return fragment(element("p", caption, class_="about"), scrolled)


def _row(label: str, tasks: Sequence[str], runs: Sequence[Run], *, before: bool = False) -> Markup:
    cells = []
    for task in tasks:
        found = task_cells(runs, task, before=before)
        n = min(run.n_episodes for run in runs)
        cells.append(with_interval(rate(found, n, before=before)) if found else element("td", "-"))
    return element("tr", element("th", label, scope="row"), cells)


def with_interval(estimate: Estimate) -> Markup:
    """A cell in the colour of its rate, with the interval below."""
    if estimate.low is None or estimate.high is None:
        return heat(estimate.value)
    return heat(estimate.value, element("small", f"{number(estimate.low)} to {number(estimate.high)}"))


def heat(value: float, *below: Child) -> Markup:
    """A cell in the colour of its rate."""
    return element("td", number(value), *below, style=f"background:{colour(value)}")


def colour(value: float) -> str:
    """Orange at 0, near white in the middle, blue at 1."""
    first, second, share = (_LOST, _MIDDLE, value * 2) if value < 0.5 else (_MIDDLE, _KEPT, value * 2 - 1)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, second, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _mark(run: Run, task: str) -> list[Child]:
    if task in run.new_tasks:
        return [element("small", "new")]
    return [element("small", "same scene" if task in run.same_scene else "old")]


def _seeds(runs: Sequence[Run]) -> str:
    return ", ".join(map(str, sorted({run.seed for run in runs})))


def _episodes(runs: Sequence[Run]) -> str:
    counts = sorted({run.n_episodes for run in runs})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
