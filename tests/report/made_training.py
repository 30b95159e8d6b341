"""A training's directory as `craft train` leaves it, written by its own writers, with numbers from a formula."""

import math
from dataclasses import replace

from lerobot_craft.training.journal import AnchorsHeld, Held, Journal, RunFile, Took, write_run_file

TASKS = ["open the drawer", "close the drawer, slowly", 'press the "red" button']
MODULES = ["vision_tower", "language_model.layers", "lm_head"]

RECORD = RunFile(
    craft_version="0.1.0",
    created="2026-11-16T10:00:00+00:00",
    command="craft train --policy.path=base --craft.enabled=true",
    method="craft",
    mode="action",
    policy="smolvla",
    dataset="me/new",
    old_datasets=[],
    steps=40,
    batch_size=8,
    teacher="/policies/base",
    fingerprint="0123456789abcdef" * 4,
    tasks=TASKS,
    budget_unit="1 = the teacher's own error on that task",
    conflict_threshold=-0.1,
    anchors=AnchorsHeld("both", 2000, 12_300_000),
    costs=[Held("retention gradient", 1_600_000), Held("anchor cache, mapped from disk", 12_300_000)],
    end_step=40,
    took=Took(40, 20, plain_s=8.0, extra_s=2.0, start_s=1.0, process_bytes=1_500_000_000, gpu_plain_bytes=None,
              gpu_anchors_bytes=None),
)  # fmt: skip


def made_training(
    directory, *, steps=40, every=2, tasks=TASKS, drift=0.2, record=RECORD, history=True, modules=MODULES
):
    """Anchors at every `every`-th step; the first task ends at `drift`, each further one at half of the one before.

    The budget falls from 1 to 0.3. The module i is in conflict at every (i + 2)-th anchor step.
    """
    directory.mkdir(parents=True)
    journal = Journal(directory, history=history, tasks=tasks, modules=modules)
    for step in range(1, steps + 1):
        values = {"step": step, "update_s": 0.25, "loss": 1.0 / step, "method": "craft", "mode": "action"}
        if step % every == 0:
            values |= _anchor_values(step // every, step / steps, tasks, drift, modules)
            values["retention_s"] = 0.1
            journal.anchor_step(values)
        journal.log(values)
    journal.close()
    if record is not None:
        write_run_file(directory, replace(record, tasks=list(tasks), steps=steps, end_step=steps))
    return directory


def _anchor_values(number, progress, tasks, drift, modules):
    of_tasks = [drift / 2**i * min(1.0, 2 * progress) * (1 + 0.1 * math.sin(number)) for i in range(len(tasks))]
    lambdas = [1.0 + progress * i for i in range(len(tasks))]
    return {
        "retention_loss": sum(of_tasks) / len(of_tasks),
        "lambda": sum(lambdas) / len(lambdas),
        "epsilon": 1.0 - 0.7 * progress,
        "conflict": number % 2 == 0,
        "cos": -0.5 if number % 2 == 0 else 0.5,
        **{f"retention_loss/{task}": value for task, value in zip(tasks, of_tasks, strict=True)},
        **{f"lambda/{task}": value for task, value in zip(tasks, lambdas, strict=True)},
        **{f"cos/{module}": -0.3 if number % (i + 2) == 0 else 0.1 for i, module in enumerate(modules)},
    }
