"""Cells: the smallest parts of a bench. Each is run once and its result kept.

There are six kinds. `Demos` records the demonstrations of a scenario. `Base` trains a policy on the old tasks, `Trial`
rolls it out before fine-tuning, and `Rollouts` records its own episodes. `Run` fine-tunes it on a new task; in a
sequence each task is a run that starts from the previous one. `Film` draws a policy's rollouts.

A cell is identified by the digest of its inputs and of the cells it needs; the code is not included. A result is valid
for the version of this package that made it (bench/cell_files.py). Demonstrations and base policies, which take most of
the time, are valid until `REVISION` is raised. Code changes within a version are not detected: remove the affected
cells.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from lerobot_craft.bench.base_policies import BenchPolicy
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.bench.method_definition import FRAMES_OF_ROLLOUTS, Known, Method
from lerobot_craft.bench.scenarios import Scenario
from lerobot_craft.bench.settings import NEW_SEED, OLD_SEED, ROLLOUT_SEED, BenchSettings, first_start

_DIGITS = 12  # of the digest, in directory names
# Raise this if a change affects demonstrations or base policies.
REVISION = 2
_PLACEHOLDER = Known(0, False, "OLD", "OLD", "INSTRUCTIONS", "LAYERS", "ANCHORS", "MEMORY")
_BASE_CHECKPOINT = "checkpoints/last/pretrained_model"


@dataclass(frozen=True, eq=False)
class Cell:
    """One part of a bench of a scenario; see the kinds below."""

    kind: ClassVar[str]
    outlives_versions: ClassVar[bool] = False
    settings: BenchSettings
    scenario: Scenario

    @property
    def name(self) -> str:
        """A readable name, and the start of the directory's name."""
        return self.scenario.name

    @property
    def inputs(self) -> dict[str, Any]:
        """Everything that the result depends on besides `needs`, as JSON values."""
        raise NotImplementedError

    @property
    def needs(self) -> "tuple[Cell, ...]":
        """Cells that must be finished first."""
        return ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of inputs and needs."""
        content = {"kind": self.kind, "inputs": self.inputs, "needs": [cell.digest for cell in self.needs]}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def directory(self) -> Path:
        """The cell's directory."""
        return self.settings.output_dir / "cells" / f"{self.kind}-{self.name}-{self.digest[:_DIGITS]}"

    @property
    def output_dir(self) -> Path:
        """Output directory of its training."""
        return self.directory / "train"

    @property
    def anchors(self) -> Path:
        """Its anchor cache, if it has one."""
        return self.directory / "anchors"

    @property
    def tasks(self) -> tuple[str, ...]:
        """All tasks of the scenario, old and new."""
        return (*self.scenario.old, *self.scenario.new)

    def chain(self) -> "Iterator[Cell]":
        """All needed cells, in order, then the cell itself."""
        seen: set[str] = set()
        for needed in self.needs:
            for cell in needed.chain():
                if cell.digest not in seen:
                    seen.add(cell.digest)
                    yield cell
        yield self


@dataclass(frozen=True, eq=False)
class Demos(Cell):
    """`episodes` demonstrations of each task in `recorded` as one dataset: of all old tasks, or of a new one."""

    kind: ClassVar[str] = "demos"
    outlives_versions: ClassVar[bool] = True
    recorded: tuple[str, ...]
    episodes: int

    @property
    def is_old(self) -> bool:
        """Whether these are the old tasks."""
        return self.recorded == self.scenario.old

    @property
    def name(self) -> str:
        """The scenario's name, plus the task's if it is new."""
        return self.scenario.name if self.is_old else f"{self.scenario.name}-{self.recorded[0]}"

    @property
    def inputs(self) -> dict[str, Any]:
        """Tasks, demonstrations per task, seed, view and revision."""
        view = self.settings.view
        return {
            "tasks": [asdict(find_task(task, view)) for task in self.recorded],
            "episodes": self.episodes,
            "seed": self.seed,
            "view": view,
            "revision": REVISION,
        }

    @property
    def seed(self) -> int:
        """Seed of start states and recording noise."""
        return OLD_SEED if self.is_old else NEW_SEED

    @property
    def data(self) -> Path:
        """The dataset."""
        return self.directory / ("old" if self.is_old else f"new-{self.recorded[0]}")


@dataclass(frozen=True, eq=False)
class Base(Cell):
    """A policy trained on the old tasks, and its values on some old frames."""

    kind: ClassVar[str] = "base"
    outlives_versions: ClassVar[bool] = True
    policy: BenchPolicy
    seed: int
    demos: Demos

    @property
    def name(self) -> str:
        """Scenario, policy and seed."""
        return f"{self.scenario.name}-{self.policy.name}-seed{self.seed}"

    @property
    def inputs(self) -> dict[str, Any]:
        """The policy and its training."""
        training = self.policy.base.changed(self.settings.base_steps, self.settings.batch_size)
        return {
            "policy": self.policy.as_json(),
            "instructions": self.instructions,  # includes new tasks, so that its tokenizer has their words
            "flags": self.policy.train_flags(training, self.seed),
            "revision": REVISION,
        }

    @property
    def needs(self) -> tuple[Cell, ...]:
        """The demonstrations."""
        return (self.demos,)

    @property
    def instructions(self) -> list[str]:
        """Instructions of all tasks, old and new."""
        return [find_task(task).instruction for task in self.tasks]

    @property
    def checkpoint(self) -> Path:
        """The trained policy."""
        return self.output_dir / _BASE_CHECKPOINT

    @property
    def file(self) -> Path | None:
        """Its weight file; None if base policies are not kept as files."""
        bases = self.settings.bases
        return None if bases is None else bases / f"{self.directory.name}.safetensors"

    @property
    def reference(self) -> Path:
        """The reference for drift: see bench/reference_drift.py."""
        return self.directory / "reference"


@dataclass(frozen=True, eq=False)
class OfBase(Cell):
    """What is done with a base policy before fine-tuning."""

    base: Base

    @property
    def name(self) -> str:
        """The base's name."""
        return self.base.name

    @property
    def needs(self) -> tuple[Cell, ...]:
        """The policy."""
        return (self.base,)


@dataclass(frozen=True, eq=False)
class Trial(OfBase):
    """A base policy's success on all tasks; in the view `seen` also blindfolded."""

    kind: ClassVar[str] = "trial"

    @property
    def inputs(self) -> dict[str, Any]:
        """The evaluation's settings."""
        return {"evaluation": self.settings.evaluation_inputs(self.base.seed)}


@dataclass(frozen=True, eq=False)
class Rollouts(OfBase):
    """A base policy's own episodes as a dataset, `episodes` of each old task, including failed ones."""

    kind: ClassVar[str] = "rollouts"
    episodes: int

    @property
    def name(self) -> str:
        """The base's name and the number of episodes."""
        return f"{self.base.name}-{self.episodes}each"

    @property
    def inputs(self) -> dict[str, Any]:
        """Number of episodes, and first start state."""
        return {"episodes": self.episodes, "seed": self.first_start}

    @property
    def first_start(self) -> int:
        """Start states that no demonstration or evaluation uses."""
        return first_start(self.base.seed, ROLLOUT_SEED)

    @property
    def data(self) -> Path:
        """The dataset."""
        return self.directory / "own"


@dataclass(frozen=True, eq=False)
class Run(Cell):
    """Fine-tuning on one new task with one method.

    Attributes:
        base: The policy trained on the old tasks.
        demos: Demonstrations of the new task.
        method: What is added to fine-tuning.
        frames: Old frames: of all old tasks together; in a sequence, of each.
        knob: Value of the method's knob; None: its default.
        before: In a sequence the previous task's run; None for the first.
        rollouts: The policy's own episodes, used instead of demonstrations of the old tasks; None: demonstrations.
    """

    kind: ClassVar[str] = "run"
    base: Base
    demos: Demos
    method: Method
    frames: int
    knob: float | None = None
    before: "Run | None" = None
    rollouts: Rollouts | None = None

    @property
    def stage(self) -> int:
        """Index of the new task in the scenario."""
        return 0 if self.before is None else self.before.stage + 1

    @property
    def new_task(self) -> str:
        """The task it learns."""
        return self.scenario.new[self.stage]

    @property
    def is_sequence(self) -> bool:
        """Whether the scenario has several stages."""
        return len(self.scenario.new) > 1

    @property
    def is_last(self) -> bool:
        """Whether this is the scenario's last stage."""
        return self.stage == len(self.scenario.new) - 1

    @property
    def name(self) -> str:
        """Scenario, policy, method, and everything that distinguishes the run."""
        parts = [self.scenario.name, self.base.policy.name, self.method.name]
        if self.rollouts is not None:
            parts += [f"{self.rollouts.episodes}rollouts"]
        elif self.method.takes_old_frames:
            parts += [f"{self.frames}frames"]
        parts += [] if self.knob is None else [f"knob{self.knob:g}"]
        parts += [f"seed{self.base.seed}"]
        return "-".join([*parts, f"stage{self.stage + 1}"] if self.is_sequence else parts)

    @property
    def inputs(self) -> dict[str, Any]:
        """Flags without paths, new task, evaluated checkpoint, and evaluation settings."""
        policy = self.base.policy
        known = _PLACEHOLDER._replace(
            frames=self.known_frames,
            rollouts=self.rollouts is not None,
            instructions=_PLACEHOLDER.instructions if policy.reads_instruction else "",
            hidden_layers=policy.hidden_layers,
        )
        remembered = {"frames_per_task": self.frames_per_task} if self.method.remembers else {}
        return remembered | {
            "flags": self.flags | self.method.train_flags(known, self.knob),
            "checkpoint": self.method.checkpoint_of(self.knob),
            "new_task": self.new_task,  # scenarios of one trunk share a base
            "stage": self.stage,
            "evaluation": self.settings.evaluation_inputs(self.base.seed),
        }

    @property
    def flags(self) -> dict[str, object]:
        """Flags of fine-tuning that do not depend on the method."""
        own = self.base.policy.fine_tuning
        steps = self.method.length * (self.settings.steps or own.steps)
        training = own.changed(steps, self.settings.batch_size, self.settings.learning_rate)
        return self.base.policy.train_flags(training, self.base.seed)

    @property
    def needs(self) -> tuple[Cell, ...]:
        """The demonstrations, and the base and its rollouts or, in a sequence, the previous stage."""
        start = self.base if self.before is None else self.before
        return (start, self.demos) if self.rollouts is None else (start, self.demos, self.rollouts)

    @property
    def start(self) -> Path:
        """The checkpoint that it starts from."""
        return self.base.checkpoint if self.before is None else self.before.checkpoint

    @property
    def checkpoint(self) -> Path:
        """The policy that is evaluated."""
        return self.output_dir / self.method.checkpoint_of(self.knob)

    @property
    def known_tasks(self) -> tuple[str, ...]:
        """The earlier tasks: those of the base, and earlier ones of a sequence."""
        return (*self.scenario.old, *self.scenario.new[: self.stage])

    @property
    def known_data(self) -> "list[Demos | Rollouts]":
        """Datasets of the earlier tasks."""
        if self.rollouts is not None:
            return [self.rollouts]
        return [self.base.demos] if self.before is None else [*self.before.known_data, self.before.demos]

    @property
    def known_frames(self) -> int:
        """Old frames of all earlier tasks together."""
        if self.rollouts is not None or self.method.remembers:
            return self.frames_per_task * len(self.known_tasks)
        return self.frames * len(self.known_tasks) if self.is_sequence else self.frames

    @property
    def frames_per_task(self) -> int:
        """Old frames per task: in a memory, or taken from rollouts."""
        return FRAMES_OF_ROLLOUTS if self.rollouts is not None else self.frames

    @property
    def remembering(self) -> Path:
        """The start checkpoint with a memory, if the method uses one."""
        return self.directory / "remembering"

    @property
    def _instructions(self) -> list[str]:
        """Instructions of the earlier tasks; empty if the policy reads none."""
        reads = self.base.policy.reads_instruction
        return [find_task(task).instruction for task in self.known_tasks] if reads else []

    @property
    def known(self) -> Known:
        """What the method gets of the earlier tasks."""
        roots = [cell.data for cell in self.known_data]
        return Known(
            frames=self.known_frames,
            rollouts=self.rollouts is not None,
            repo_id=",".join(f"craft/{root.name}" for root in roots),
            root=",".join(map(str, roots)),
            instructions="; ".join(self._instructions),
            hidden_layers=self.base.policy.hidden_layers,
            anchors=str(self.anchors),
            memory=str(self.remembering),
        )


@dataclass(frozen=True, eq=False)
class Film(Cell):
    """Filmstrips of a policy: one of the first old task and one of the first new one."""

    kind: ClassVar[str] = "film"
    filmed: Base | Run

    @property
    def name(self) -> str:
        """The filmed cell's name."""
        return self.filmed.name

    @property
    def inputs(self) -> dict[str, Any]:
        """The filmed tasks; `needs` identifies the policy."""
        return {"tasks": list(self.shown)}

    @property
    def needs(self) -> tuple[Cell, ...]:
        """The policy."""
        return (self.filmed,)

    @property
    def shown(self) -> tuple[str, ...]:
        """An old task, if possible in the new one's scene, and the new task."""
        pair = self.scenario.pair
        return (self.scenario.old[0] if pair is None else pair[0], self.scenario.new[0])

    def strip(self, task: str) -> Path:
        """Image file of a task."""
        return self.directory / f"{task}.png"
