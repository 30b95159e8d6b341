"""Where the new task pulls against the old ones: share of anchor steps in conflict, module by module."""

from collections.abc import Sequence

from lerobot_craft.report.heatmap import colour, grid
from lerobot_craft.report.markup import Markup, element, fragment
from lerobot_craft.report.training_runs import TrainingRun

_COS = "cos/"
_WHOLE = "all parameters"
_THRESHOLD = -0.1  # the default of --craft.conflict_threshold, for a run whose record is gone


def conflicts(runs: Sequence[TrainingRun]) -> Markup | None:
    """One table per set of modules, with a column per run; None where no run has a cosine."""
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
    return fragment(*(_grid(modules, group) for modules, group in groups.items()), element("p", note, class_="about"))


def modules_of(run: TrainingRun) -> tuple[str, ...]:
    """Modules that the run compared gradients in."""
    keys = dict.fromkeys(key for row in run.modules for key in row if key.startswith(_COS))
    return tuple(key.removeprefix(_COS) for key in keys)


def cosines(run: TrainingRun, module: str) -> list[float]:
    """Of the two gradients, at each anchor step that has both.

    At the first one the student is the teacher, and retention has no gradient to speak of: modules have no cosine
    there, and the whole has exactly 0, which would count as a step without a conflict.
    """
    whole = {row["step"]: row["cos"] for row in run.steps if row.get("cos")}
    if module == _WHOLE:
        return list(whole.values())
    return [row[_COS + module] for row in run.modules if _COS + module in row and row["step"] in whole]


def threshold_of(run: TrainingRun) -> float:
    """The cosine below which two gradients are in conflict."""
    return _THRESHOLD if run.record is None else run.record.conflict_threshold


def _grid(modules: Sequence[str], runs: Sequence[TrainingRun]) -> Markup:
    thresholds = ", ".join(dict.fromkeys(f"{threshold_of(run):g}" for run in runs))
    caption = (
        f"How often new task and retention pull against each other: share of anchor steps whose two gradients have a "
        f"cosine below {thresholds}. The small number is the mean cosine over the same steps."
    )
    head = [element("th", "module", scope="col"), *map(_head, runs)]
    rows = [
        element("tr", element("th", module, scope="row"), [_cell(run, module) for run in runs])
        for module in (_WHOLE, *modules)
    ]
    return grid(caption, head, rows)


def _head(run: TrainingRun) -> Markup:
    return element("th", run.name, element("small", _steps(len(cosines(run, _WHOLE)))), scope="col")


def _steps(n: int) -> str:
    return f"n = {n:,} anchor step{'' if n == 1 else 's'}"


def _cell(run: TrainingRun, module: str) -> Markup:
    found = cosines(run, module)
    if not found:
        return element("td", "-")
    share = sum(cos < threshold_of(run) for cos in found) / len(found)
    mean = element("small", f"{sum(found) / len(found):+.2f}")
    # Some modules are not reached at every step; the column's n is then not theirs.
    fewer = element("small", _steps(len(found))) if len(found) < len(cosines(run, _WHOLE)) else None
    return element("td", f"{share:.0%}", mean, fewer, style=f"background:{colour(1 - share)}")
