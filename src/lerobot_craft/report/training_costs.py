"""What each training took: seconds, anchors, memory."""

from collections.abc import Sequence
from statistics import median

from lerobot_craft.report.markup import Child, Markup, element, fragment
from lerobot_craft.report.tables import size, table
from lerobot_craft.report.training_runs import TrainingRun


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
    return table(columns, [_row(run) for run in runs], caption)


def training_commands(runs: Sequence[TrainingRun]) -> Markup | None:
    """The line of each run whose record has one."""
    lines = [run.record.command for run in runs if run.record is not None and run.record.command]
    return fragment([element("pre", element("code", line)) for line in lines]) if lines else None


def seconds_per_step(run: TrainingRun) -> tuple[float | None, float | None]:
    """All of a step without waiting for data, and the method's own part of it."""
    took = None if run.record is None else run.record.took
    if took is not None and took.steps:
        return (took.plain_s + took.extra_s) / took.steps, took.extra_s / took.steps
    whole, own = ([row[key] for row in run.metrics if key in row] for key in ("update_s", "retention_s"))
    # Retention is logged of its own steps only: between them a step has none, so its median is no mean over steps.
    return (median(whole) if whole else None), (median(own) if own and len(own) == len(whole) else None)


def _row(run: TrainingRun) -> list[Child]:
    record = run.record
    whole, own = seconds_per_step(run)
    anchors = None if record is None else record.anchors
    took = None if record is None else record.took
    return [
        run.name,
        run.method,
        _seconds(whole),
        "-" if whole is None or own is None or whole == 0 else f"{own / whole:.0%}",
        "-" if anchors is None else f"{anchors.number:,} ({anchors.source})",
        "-" if anchors is None else size(anchors.bytes),
        "-" if record is None else size(sum(cost.bytes for cost in record.costs)),
        "-" if took is None or took.process_bytes is None else size(took.process_bytes),
        "-" if took is None or took.gpu_anchors_bytes is None else size(took.gpu_anchors_bytes),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
