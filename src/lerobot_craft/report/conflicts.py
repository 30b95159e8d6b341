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
    """Of the two gradients, at each anchor step that has one."""
    if module == _WHOLE:
        return [cos for _, cos in run.series("cos")]
    return [row[_COS + module] for row in run.modules if _COS + module in row]


def threshold_of(run: TrainingRun) -> float:
    """The cosine below which two gradients are in conflict."""
    return _THRESHOLD if run.record is None else run.record.conflict_threshold


def _grid(modules: Sequence[str], runs: Sequence[TrainingRun]) -> Markup:
    thresholds = ", ".join(dict.fromkeys(f"{threshold_of(run):g}" for run in runs))
    caption = (
        f"Share of anchor steps in which the gradients of new task and retention have a cosine below {thresholds}; "
        "below it the mean cosine"
    )
    head = [element("th", "module", scope="col"), *(element("th", run.name, scope="col") for run in runs)]
    rows = [
        element("tr", element("th", module, scope="row"), [_cell(run, module) for run in runs])
        for module in (_WHOLE, *modules)
    ]
    return grid(caption, head, rows)


def _cell(run: TrainingRun, module: str) -> Markup:
    found = cosines(run, module)
    if not found:
        return element("td", "-")
    share = sum(cos < threshold_of(run) for cos in found) / len(found)
    mean = element("small", f"{sum(found) / len(found):+.2f}")
    return element("td", f"{share:.0%}", mean, style=f"background:{colour(1 - share)}")
