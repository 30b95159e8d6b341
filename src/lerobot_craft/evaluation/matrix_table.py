"""An evaluation as Markdown: rates with Wilson's intervals, and the scores of a sequence."""

from lerobot_craft.evaluation.continual import Score, auc, fwt, nbt
from lerobot_craft.evaluation.intervals import CONFIDENCE, wilson
from lerobot_craft.evaluation.matrix import Evaluation, Row
from lerobot_craft.evaluation.results import Estimate
from lerobot_craft.evaluation.table import cell, format_estimate, number

CONVENTIONS = (
    "NBT, FWT and AUC as in LIBERO (Liu et al. 2023), each stage measured at its end. NBT is the mean loss of a skill "
    "in later stages, without the last task, which has none; lower is better. FWT is success right after learning, AUC "
    "mean success from then on. All tasks: those that the first checkpoint came with are learned in stage 0."
)


def matrix_table(evaluation: Evaluation) -> str:
    """One row per checkpoint, one column per task; what was not played is a dash."""
    tasks = evaluation.tasks
    lines = [
        f"n = {evaluation.n_episodes} episodes per task, {CONFIDENCE:.0%} intervals (Wilson)",
        "",
        f"| checkpoint | {' | '.join(map(cell, tasks))} | mean |",
        "|---" * (len(tasks) + 2) + "|",
    ]
    for row in evaluation.rows:
        entries = [format_estimate(rate_of(row, task)) for task in tasks]
        lines.append(f"| {cell(row.name)} | {' | '.join(entries)} | {_mean(row, tasks)} |")
    return "\n".join(lines)


def before_and_after(evaluation: Evaluation, row: Row, teacher: str) -> str:
    """One checkpoint beside the policy that it was fine-tuned from, for its model card.

    Args:
        evaluation: Both, or the checkpoint alone.
        row: Of the checkpoint.
        teacher: Fingerprint of the policy before fine-tuning, by whatever name it was evaluated.
    """
    before = next((other for other in evaluation.rows if other.fingerprint == teacher), None)
    tasks = list(row.successes)
    shown = [("this checkpoint", row)] if before is None else [("before fine-tuning", before), ("this checkpoint", row)]
    lines = [f"| | {' | '.join(map(cell, tasks))} |", "|---" * (len(tasks) + 1) + "|"]
    for name, own in shown:
        lines.append(f"| {name} | {' | '.join(format_estimate(rate_of(own, task)) for task in tasks)} |")
    note = (
        f"Success in `{evaluation.env['type']}`, n = {evaluation.n_episodes} episodes per task from the same start "
        f"states (seed {evaluation.seed}), {CONFIDENCE:.0%} intervals (Wilson); `craft eval` of CRaFT "
        f"{evaluation.craft_version}, {evaluation.created[:10]}."
    )
    missing = [] if before is not None else ["The policy before fine-tuning was not evaluated beside it."]
    return "\n".join([*lines, "", " ".join([note, *missing])])


def rate_of(row: Row, task: str) -> Estimate | None:
    """A rate with its interval; None where it was not played."""
    if task not in row.successes:
        return None
    successes = row.successes[task]
    return Estimate(row.rate(task), *wilson(sum(successes), len(successes)))


def sequence_scores(evaluation: Evaluation) -> list[tuple[str, Score]]:
    """Name and value of each score of a sequence; empty where the rows are none."""
    matrix = evaluation.sequence()
    if matrix is None:
        return []
    found = (
        ("NBT, all tasks", nbt(matrix, matrix.all_tasks)),
        ("NBT, new tasks", nbt(matrix, matrix.new_tasks)),
        ("FWT, new tasks", fwt(matrix, matrix.new_tasks)),
        ("AUC, all tasks", auc(matrix, matrix.all_tasks)),
        ("AUC, new tasks", auc(matrix, matrix.new_tasks)),
    )
    return [(name, score) for name, score in found if score is not None]


def scores_table(evaluation: Evaluation) -> str:
    """The scores, or nothing."""
    scores = sequence_scores(evaluation)
    if not scores:
        return ""
    rows = [f"| {name} | {number(score.value)} ± {number(score.error)} |" for name, score in scores]
    return "\n".join(["| score | value ± standard error |", "|---|---|", *rows, "", CONVENTIONS])


def _mean(row: Row, tasks: list[str]) -> str:
    # Of different tasks at different checkpoints a mean would mislead.
    return number(sum(map(row.rate, tasks)) / len(tasks)) if tasks and set(row.successes) == set(tasks) else "-"
