"""`evaluation.json`, schema 2: success of checkpoints (rows) on tasks (columns), by episode; and it as Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.continual import Score, SuccessMatrix, auc, fwt, nbt
from lerobot_craft.evaluation.intervals import CONFIDENCE, wilson
from lerobot_craft.evaluation.results import Estimate, read_versioned
from lerobot_craft.evaluation.table import cell, format_estimate, number
from lerobot_craft.io.files import read_bytes, write_atomically
from lerobot_craft.io.strict_json import StrictJSONError, decode, parse_object, to_json

SCHEMA = 2
_WITHOUT_RENAMING = 1  # the schema before --rename_map; still read, because rollouts are expensive
EVALUATION_FILE = "evaluation.json"
CONVENTIONS = (
    "NBT, FWT and AUC as in LIBERO (Liu et al. 2023), each stage measured at its end. NBT is the mean loss of a skill "
    "in later stages, without the last task, which has none; lower is better. FWT is success right after learning, AUC "
    "mean success from then on. All tasks: those that the first checkpoint came with are learned in stage 0."
)


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    Attributes:
        name: What tables call it.
        checkpoint: Where it was found.
        fingerprint: SHA-256 of its weights and processors, to notice another policy under the same name.
        successes: Task -> whether each episode succeeded; tasks not played yet are missing.
    """

    name: str
    checkpoint: str
    fingerprint: str
    successes: dict[str, list[bool]]

    def rate(self, task: str) -> float:
        """Share of successful episodes."""
        return sum(self.successes[task]) / len(self.successes[task])


@dataclass(frozen=True)
class Evaluation:
    """What `evaluation.json` holds.

    Attributes:
        env: Type and settings of the environment, as lerobot writes them.
        rename_map: Observations that have another name in the policies: the environment's name -> theirs.
        n_episodes: Episodes behind each rate.
        batch_size: Episodes played side by side: the policy's noise is drawn for all of them together.
        seed: Seed of the first start state; episode i starts from `seed + i`, for every checkpoint.
        learned: In a sequence, the task that the second, third, ... row learned; else empty.
    """

    schema: int
    craft_version: str
    created: str
    command: str
    env: dict[str, Any]
    rename_map: dict[str, str]
    n_episodes: int
    batch_size: int
    seed: int
    learned: list[str]
    rows: list[Row]

    @property
    def tasks(self) -> list[str]:
        """Tasks that any row has played, in the order of `--env.task`: the file does not keep the order of its keys."""
        suites = [suite.strip() for suite in str(self.env.get("task") or "").split(",")]
        played = dict.fromkeys(task for row in self.rows for task in row.successes)
        return sorted(played, key=lambda task: _place(task, suites))

    def sequence(self) -> SuccessMatrix | None:
        """The first rows as stages of a sequence; None if they are no sequence, or not all played."""
        stages = self.rows[: len(self.learned) + 1]
        if not self.learned or any(set(row.successes) != set(self.tasks) for row in stages):
            return None
        after: Sequence[Mapping[str, float]] = [{task: row.rate(task) for task in self.tasks} for row in stages]
        return SuccessMatrix(after, self.learned, self.n_episodes)

    def going_on_from(self, former: "Evaluation") -> "Evaluation":
        """This one with the rows of a former evaluation of the same settings."""
        for what in ("env", "rename_map", "n_episodes", "batch_size", "seed"):
            if getattr(self, what) != getattr(former, what):
                raise CraftError(
                    f"there is an evaluation with another {what} already ({_short(getattr(former, what))}, now "
                    f"{_short(getattr(self, what))}): take another --output_dir, or the same settings to go on with it"
                )
        return replace(self, rows=former.rows)

    def with_row(self, row: Row) -> "Evaluation":
        """With an empty row for a checkpoint, unless it has one."""
        known = {known.name: known for known in self.rows}.get(row.name)
        if known is None:
            return replace(self, rows=[*self.rows, row])
        if known.fingerprint != row.fingerprint:
            raise CraftError(
                f"{row.name} was evaluated already, but as another policy ({known.checkpoint}): give this one another "
                "name (NAME=CHECKPOINT), or take another --output_dir"
            )
        return self

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def with_entry(self, name: str, task: str, successes: list[bool]) -> "Evaluation":
        """With the episodes of one checkpoint on one task."""
        entered = {row.name: replace(row, successes=row.successes | {task: successes}) for row in self.rows}
        return replace(self, rows=[entered[row.name] if row.name == name else row for row in self.rows])

    def in_order(self, names: Sequence[str]) -> "Evaluation":
        """With these rows first, in this order."""
        others = [row for row in self.rows if row.name not in names]
        return replace(self, rows=[*map(self.row, names), *others])


def write_evaluation(path: Path, evaluation: Evaluation) -> None:
    """Write the file atomically: a reader sees the former one or this one."""
    write_atomically(path, to_json(evaluation))


def read_evaluation(path: Path) -> Evaluation:
    """Read an `evaluation.json` strictly."""
    try:
        evaluation = _read(path)
        _check(evaluation)
    except StrictJSONError as error:
        raise CraftError(
            f"{path} is no evaluation of this release: {error}. Remove it and run `craft eval` again."
        ) from error
    return evaluation


def _read(path: Path) -> Evaluation:
    content = parse_object(read_bytes(path))
    if content.get("schema") == _WITHOUT_RENAMING and "rename_map" not in content:
        return replace(decode(Evaluation, {**content, "rename_map": {}}), schema=SCHEMA)
    return read_versioned(path, Evaluation, SCHEMA)


def _check(evaluation: Evaluation) -> None:
    names = [row.name for row in evaluation.rows]
    if len(set(names)) != len(names):
        raise StrictJSONError("rows: two have the same name")
    for row in evaluation.rows:
        for task, successes in row.successes.items():
            if len(successes) != evaluation.n_episodes:
                raise StrictJSONError(
                    f"rows: {row.name} has {len(successes)} episodes of {task}, expected {evaluation.n_episodes}"
                )


def _place(task: str, suites: Sequence[str]) -> tuple[int, int]:
    """Position of a task's suite, and the task's number if the suite has several (`libero_spatial/10`)."""
    suite, _, number = task.partition("/")
    return suites.index(suite) if suite in suites else len(suites), int(number) if number.isdecimal() else 0


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def matrix_table(evaluation: Evaluation) -> str:
    """One row per checkpoint, one column per task; a dash if not played."""
    tasks = evaluation.tasks
    lines = [
        f"n = {evaluation.n_episodes} episodes per task, {CONFIDENCE:.0%} intervals (Wilson)",
        "",
        f"| checkpoint | {' | '.join(map(cell, tasks))} | mean |",
        "|---" * (len(tasks) + 2) + "|",
    ]
    for row in evaluation.rows:
        entries = [format_estimate(rate_of(row, task)) for task in tasks]
        lines.append(f"| {cell(row.name)} | {' | '.join(entries)} | {_mean_rate(row, tasks)} |")
    return "\n".join(lines)


def before_and_after(evaluation: Evaluation, row: Row, teacher: str) -> str:
    """One checkpoint and the policy that it was fine-tuned from, for its model card.

    Args:
        evaluation: Both, or the checkpoint alone.
        row: The row of the checkpoint.
        teacher: Fingerprint of the policy before fine-tuning; its row may have any name.
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
    """A rate with its interval; None if not played."""
    if task not in row.successes:
        return None
    successes = row.successes[task]
    return Estimate(row.rate(task), *wilson(sum(successes), len(successes)))


def sequence_scores(evaluation: Evaluation) -> list[tuple[str, Score]]:
    """Name and value of each score of a sequence; empty if the rows are no sequence."""
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


def _mean_rate(row: Row, tasks: list[str]) -> str:
    # A mean over different tasks at different checkpoints would mislead.
    return number(sum(map(row.rate, tasks)) / len(tasks)) if tasks and set(row.successes) == set(tasks) else "-"
