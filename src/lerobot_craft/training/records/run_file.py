"""`run.json`, schema 1: what a run of `craft train` is, and once it has ended what it took. Read strictly."""

from dataclasses import dataclass, field
from pathlib import Path

from lerobot_craft.anchors.files import read_bytes, write_atomically
from lerobot_craft.anchors.strict_json import StrictJSONError, decode, parse_object, to_json
from lerobot_craft.errors import CraftError

RUN_FILE = "run.json"
_SCHEMA = 1


@dataclass(frozen=True)
class Held:
    """Memory beyond plain fine-tuning."""

    what: str
    bytes: int


@dataclass(frozen=True)
class AnchorsHeld:
    """The anchors: where their inputs come from (`dataset`, `cross`, `both`), how many, and bytes of their cache."""

    source: str
    number: int
    bytes: int


@dataclass(frozen=True)
class Took:
    """What the steps of the last process of a run took; `records.summary` has the meaning of each number.

    Attributes:
        steps: Steps that were measured.
        anchor_steps: Those of them that visited anchors.
        plain_s: Seconds of all of them without the method's own part.
        extra_s: Seconds of the method's own part.
        start_s: Seconds before the first step.
        process_bytes: Peak of main memory; None where the system does not tell.
        gpu_plain_bytes: Peak of the GPU in steps without anchors; None where there were none.
        gpu_anchors_bytes: In steps with anchors, likewise.
    """

    steps: int
    anchor_steps: int
    plain_s: float
    extra_s: float
    start_s: float
    process_bytes: int | None
    gpu_plain_bytes: int | None
    gpu_anchors_bytes: int | None


@dataclass(frozen=True)
class RunFile:
    """A run.

    Attributes:
        craft_version: The release that ran it.
        created: When it was started, or resumed last.
        command: The line that did.
        method: `--craft.method`.
        mode: What is retained; None for a method without anchors of old tasks.
        policy: lerobot's name of the policy.
        dataset: Of the new task.
        old_datasets: Of the old tasks, where one is named.
        steps: How many are asked for.
        batch_size: New frames of each process in a step; with micro-batches of all of them.
        teacher: Where the policy before fine-tuning was found.
        fingerprint: Of that policy, as `craft eval` knows it.
        tasks: Old instructions.
        budget_unit: What a drift of 1 means, in words; None without a budget.
        conflict_threshold: Cosine below which two gradients are in conflict.
        anchors: None for a method without anchors of old tasks.
        costs: Memory beyond plain fine-tuning.
        end_step: The last step; None while the run goes on, and where it was killed.
        took: None likewise.
        measured_on: What the drift of the actions was measured on, in words; None where it was not measured.
        memory: What travels with the checkpoints, a line for each dataset.
    """

    craft_version: str
    created: str
    command: str
    method: str
    mode: str | None
    policy: str
    dataset: str
    old_datasets: list[str]
    steps: int
    batch_size: int
    teacher: str
    fingerprint: str
    tasks: list[str]
    budget_unit: str | None
    conflict_threshold: float
    anchors: AnchorsHeld | None
    costs: list[Held] = field(default_factory=list)
    end_step: int | None = None
    took: Took | None = None
    measured_on: str | None = None
    memory: list[str] = field(default_factory=list)
    schema: int = _SCHEMA


def write_run_file(output_dir: Path, run: RunFile) -> None:
    """Write `run.json` so that a reader sees the former file or this one, never a part."""
    write_atomically(output_dir / RUN_FILE, to_json(run))


def read_run_file(output_dir: Path) -> RunFile:
    """Read `run.json`; anything unknown, missing, doubled or of another type is refused with the field's name."""
    path = output_dir / RUN_FILE
    try:
        content = parse_object(read_bytes(path))
        if content.get("schema") != _SCHEMA:
            raise StrictJSONError(f"schema: this release reads {_SCHEMA}, the file has {content.get('schema')!r:.40}")
        # Of runs before there were memories.
        return decode(RunFile, {"measured_on": None, "memory": [], **content})
    except StrictJSONError as error:
        raise CraftError(
            f"{path} is no record of this release ({error}): bring back a copy of it, or move it away; the run is "
            "then shown without it."
        ) from error
