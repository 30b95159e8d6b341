"""The page of `craft eval`: success of checkpoints on tasks, and the scores of a sequence."""

from lerobot_craft.evaluation.intervals import CONFIDENCE
from lerobot_craft.evaluation.matrix import Evaluation, Row
from lerobot_craft.evaluation.matrix_table import CONVENTIONS, rate_of, sequence_scores
from lerobot_craft.evaluation.table import number
from lerobot_craft.report.heatmap import grid, with_interval
from lerobot_craft.report.layout import page, stamp
from lerobot_craft.report.markup import Markup, element, fragment
from lerobot_craft.report.tables import table


def render_evaluation(evaluation: Evaluation) -> str:
    """One HTML page."""
    sections = (
        ("Success", success_grid(evaluation)),
        ("As a sequence of tasks", score_table(evaluation)),
        ("Checkpoints", checkpoint_table(evaluation)),
        ("Command", element("pre", evaluation.command)),
    )
    return page("What the checkpoints can do", [stamp([evaluation])], sections)


def success_grid(evaluation: Evaluation) -> Markup:
    """Rates with intervals: a row per checkpoint, a column per task."""
    caption = (
        f"{evaluation.env['type']}: n = {evaluation.n_episodes} episodes per task, the same start states for all "
        f"(seed {evaluation.seed}); below each rate its {CONFIDENCE:.0%} interval (Wilson)"
    )
    head = [element("th", name, scope="col") for name in ("checkpoint", *evaluation.tasks)]
    return grid(caption, head, [_row(row, evaluation) for row in evaluation.rows])


def _row(row: Row, evaluation: Evaluation) -> Markup:
    return element("tr", element("th", row.name, scope="row"), [_cell(row, task) for task in evaluation.tasks])


def _cell(row: Row, task: str) -> Markup:
    rate = rate_of(row, task)
    return element("td", "-") if rate is None else with_interval(rate)


def score_table(evaluation: Evaluation) -> Markup | None:
    """Scores of a sequence; None where the checkpoints are none."""
    scores = sequence_scores(evaluation)
    if not scores:
        return None
    caption = f"learned one after the other: {', '.join(evaluation.learned)}"
    rows = [[name, f"{number(score.value)} ± {number(score.error)}"] for name, score in scores]
    return fragment(table(["score", "value ± standard error"], rows, caption), element("p", CONVENTIONS))


def checkpoint_table(evaluation: Evaluation) -> Markup:
    """Where each checkpoint was found."""
    rows = [[row.name, row.checkpoint] for row in evaluation.rows]
    return table(["name", "checkpoint"], rows, "where they were found")
