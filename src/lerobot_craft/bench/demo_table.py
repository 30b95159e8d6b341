"""The demo's table: success on each task, before and after."""

from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.evaluation.intervals import wilson
from lerobot_craft.evaluation.results import Results, Run
from lerobot_craft.evaluation.summary import BASE_LABEL


def task_table(results: Results) -> str:
    """Success on each task as Markdown, aligned for a terminal; all runs share one base."""
    first = results.runs[0]
    # First the old task most at risk: only its instruction distinguishes it from the new one.
    tasks = [*sorted(first.old_tasks, key=lambda task: task not in first.same_scene), *first.new_tasks]
    head = ["", *(f"{task} ({'new' if task in first.new_tasks else 'old'})" for task in tasks)]
    rows = [[BASE_LABEL, *(_rate(first.base[task], first.n_episodes) for task in tasks)]]
    rows += [[_label(run), *(_rate(run.after[task], run.n_episodes) for task in tasks)] for run in results.runs]
    said = "\n".join(f'{task}: "{find_task(task).instruction}"' for task in tasks)
    return f"{_aligned(head, rows)}\n\n{said}\n{first.n_episodes} rollouts per cell, 95 % Wilson intervals, one seed"


def _label(run: Run) -> str:
    if run.anchors.source is None:
        return run.label
    return f"{run.label}, {f'{run.anchors.frames} old frames' if run.anchors.frames else 'no old frame'}"


def _rate(rate: float, n: int) -> str:
    low, high = wilson(round(rate * n), n)
    return f"{rate:.2f} [{low:.2f}, {high:.2f}]"


def _aligned(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))} |"
        for row in [head, rule, *rows]
    )
