"""`evaluation.json`, schema 2: success of checkpoints (rows) on tasks (columns), episode by episode."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.files import read_bytes, write_atomically
from lerobot_craft.anchors.strict_json import StrictJSONError, decode, parse_object, to_json
from lerobot_craft.errors import CraftError
from lerobot_craft.evaluation.continual import SuccessMatrix
from lerobot_craft.evaluation.versioned import read_versioned

SCHEMA = 2
_WITHOUT_RENAMING = 1  # the schema before --rename_map: rollouts are not cheap, so it is still read
EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class Row:
    """One checkpoint.

    Attributes:
        name: What tables call it.
        checkpoint: Where it was found.
        fingerprint: SHA-256 of its weights and processors: another policy under the same name is noticed.
        successes: Task -> whether each episode succeeded; tasks that were not played yet are not there.
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
    """All of it.

    Attributes:
        env: Type and settings of the environment, as lerobot writes them down.
        rename_map: Observations that the environment names otherwise than the policies: its name -> theirs.
        n_episodes: Behind each rate.
        batch_size: Episodes played side by side: the policy's noise is drawn for all of them together.
        seed: Of the first start state; episode i starts from `seed + i`, for every checkpoint.
        learned: In a sequence, what the second, third, ... row has learned on top of the one before; else empty.
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
        """All tasks that any row has played, in the order of `--env.task`: the file does not keep that of its keys."""
        suites = [suite.strip() for suite in str(self.env.get("task") or "").split(",")]
        played = dict.fromkeys(task for row in self.rows for task in row.successes)
        return sorted(played, key=lambda task: _place(task, suites))

    def sequence(self) -> SuccessMatrix | None:
        """The first rows as stages of a sequence; None where they are not, or not all played."""
        stages = self.rows[: len(self.learned) + 1]
        if not self.learned or any(set(row.successes) != set(self.tasks) for row in stages):
            return None
        after: Sequence[Mapping[str, float]] = [{task: row.rate(task) for task in self.tasks} for row in stages]
        return SuccessMatrix(after, self.learned, self.n_episodes)

    def going_on_from(self, former: "Evaluation") -> "Evaluation":
        """With the rows of a former evaluation, which must have measured the same."""
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
    """Write it so that a reader sees the former file or this one, never a part."""
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
    """Position of a task's suite, and the task's number where the suite has several (`libero_spatial/10`)."""
    suite, _, number = task.partition("/")
    return suites.index(suite) if suite in suites else len(suites), int(number) if number.isdecimal() else 0


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
