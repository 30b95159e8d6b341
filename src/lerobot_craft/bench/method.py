"""What a method of the bench is: flags of `craft train`, the old frames it needs, and its one knob."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from lerobot_craft.errors import CraftError

Flags = dict[str, object]
# none: no frame of the old tasks | some: as many as --anchors says, but not 0 | any: also 0 | all: every one.
Frames = Literal["none", "some", "any", "all"]

FRAMES_OF_ROLLOUTS = 100  # per task that methods take of a policy's own rollouts; replay takes every one
_FLAG = re.compile(r"--[\w.]+=.*")
_LAST_CHECKPOINT = "checkpoints/last/pretrained_model"


class Known(NamedTuple):
    """What a method is given of the old tasks.

    Attributes:
        frames: Frames of all old tasks together.
        rollouts: Whether the old datasets are the policy's own rollouts.
        repo_id: Of the datasets of the old tasks, with commas between them.
        root: Their directories, likewise.
        instructions: Of the old tasks, with semicolons between them; empty for a policy that reads none.
        hidden_layers: What "all layers" is for the policy.
        anchors: Directory for a cache.
        memory: Checkpoint whose memory has frames of the old tasks.
    """

    frames: int
    rollouts: bool
    repo_id: str
    root: str
    instructions: str
    hidden_layers: str
    anchors: str
    memory: str = ""


class Knob(NamedTuple):
    """The one number of a method: its flags (all set to the same value), the value, and what a sweep tries."""

    flags: tuple[str, ...]
    value: float
    grid: tuple[float, ...]


@dataclass(frozen=True)
class Method:
    """One line of the comparison.

    Attributes:
        name: As `--methods` has it.
        label: For tables.
        frames: How many frames of the old tasks it makes use of.
        flags: What it adds to `craft train`, without the knob.
        knob: Its one number.
        policies: Types of policies that it exists for; empty: all.
        needs_instructions: Whether it does not exist for a policy that reads none.
        source: What the old tasks are represented by, for tables.
        checkpoint: The policy to evaluate, inside of the run's output directory; may hold the knob's `{value}`.
        length: Times the steps of fine-tuning.
        remembers: Whether the old frames are a memory of the checkpoint; their number is then that of each task.
        changes: Flags of `craft train` that take the place of its own: what makes it a variant.
    """

    name: str
    label: str
    frames: Frames
    flags: Callable[[Known], Flags]
    knob: Knob | None = None
    policies: tuple[str, ...] = ()
    needs_instructions: bool = False
    source: str = "none"
    checkpoint: str = _LAST_CHECKPOINT
    length: int = 1
    remembers: bool = False
    changes: Mapping[str, str] = field(default_factory=dict)

    def with_flags(self, flags: Sequence[str]) -> "Method":
        """A variant with other flags, each as it is typed: `--craft.loss_type=l1`."""
        if not flags:
            return self
        wrong = [flag for flag in flags if not _FLAG.fullmatch(flag)]
        if wrong:
            raise CraftError(f"--variant: {wrong[0]} is no flag of craft train: write --craft.NAME=VALUE")
        changes = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
        shown = [f"{name.removeprefix('craft.')}={value}" for name, value in changes.items()]
        return replace(self, name="+".join([self.name, *shown]), label=", ".join([self.label, *shown]), changes=changes)

    @property
    def takes_old_frames(self) -> bool:
        """Whether it makes use of a number of old frames, or of rollouts in their place."""
        return self.frames in ("some", "any")

    def counts(self, asked: tuple[int, ...], *, instructions: bool) -> tuple[int, ...]:
        """Of the numbers of old frames that are asked for, those at which it is another method.

        Without instructions old frames are all that is left to keep the old tasks by, so 0 of them is no method.
        """
        if self.frames in ("none", "all"):
            return (0,)
        return tuple(count for count in asked if count > 0 or (self.frames == "any" and instructions))

    def train_flags(self, known: Known, value: float | None) -> Flags:
        """All that it adds to `craft train`; `value` is the knob's, None its own."""
        flags: Flags = {"craft.enabled": True, "craft.preload": True, **self.flags(known)}
        if self.knob is not None:
            flags |= dict.fromkeys(self.knob.flags, self.knob.value if value is None else value)
        # The bench measures all methods on the same old frames, afterwards: see bench/drift.py.
        flags |= ({} if self.remembers else {"craft.probe_anchors": 0}) | {"craft.log_craft_metrics_freq": 0}
        return flags | self.changes

    def checkpoint_of(self, value: float | None) -> str:
        """The policy to evaluate, for a value of the knob."""
        if self.knob is not None and value is None:
            value = self.knob.value
        return self.checkpoint.format(value=value)


def as_argv(flags: Mapping[str, object]) -> list[str]:
    """Flags as they are typed."""
    return [f"--{name}={_typed(value)}" for name, value in flags.items()]


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
