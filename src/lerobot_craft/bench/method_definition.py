"""The definition of a bench method: flags of `craft train`, the old frames it needs, and its one knob."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from lerobot_craft.errors import CraftError

Flags = dict[str, object]
# none: no old frames | some: as many as --anchors says, but not 0 | any: 0 is allowed too | all: every frame.
Frames = Literal["none", "some", "any", "all"]

FRAMES_OF_ROLLOUTS = 100  # per task, used from a policy's own rollouts; replay uses all
_FLAG = re.compile(r"--[\w.]+=.*")
_LAST_CHECKPOINT = "checkpoints/last/pretrained_model"


class Known(NamedTuple):
    """What a method gets of the old tasks.

    Attributes:
        frames: Frames of all old tasks together.
        rollouts: Whether the old datasets are the policy's own rollouts.
        repo_id: Names of the old tasks' datasets, comma-separated.
        root: Their directories, likewise.
        instructions: Instructions of the old tasks, separated by semicolons; empty if the policy reads none.
        hidden_layers: All layers of the policy.
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
    """The one number of a method: its flags (all set to the same value), default value, and sweep grid."""

    flags: tuple[str, ...]
    value: float
    grid: tuple[float, ...]


@dataclass(frozen=True)
class Method:
    """One method of the comparison.

    Attributes:
        name: As in `--methods`.
        label: For tables.
        frames: How many old frames it uses.
        flags: What it adds to `craft train`, without the knob.
        knob: Its one number.
        policies: Policy types it supports; empty: all.
        needs_instructions: Whether the policy must read instructions.
        source: What represents the old tasks, for tables.
        checkpoint: The policy to evaluate, relative to the run's output directory; may contain the knob's `{value}`.
        length: Multiple of the fine-tuning steps.
        remembers: Whether the old frames are a memory in the checkpoint; their number is then per task.
        changes: Flags of `craft train` that override its own: what makes it a variant.
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
        """A variant with other flags, as typed: `--craft.loss_type=l1`."""
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
        """Whether it uses a number of old frames, or rollouts instead."""
        return self.frames in ("some", "any")

    def counts(self, asked: tuple[int, ...], *, instructions: bool) -> tuple[int, ...]:
        """The requested numbers of old frames at which this is a distinct method.

        Without instructions only old frames can preserve the old tasks, so 0 of them is not a method.
        """
        if self.frames in ("none", "all"):
            return (0,)
        return tuple(count for count in asked if count > 0 or (self.frames == "any" and instructions))

    def train_flags(self, known: Known, value: float | None) -> Flags:
        """Everything it adds to `craft train`; `value` is the knob's, None: its default."""
        flags: Flags = {"craft.enabled": True, "craft.preload": True, **self.flags(known)}
        if self.knob is not None:
            flags |= dict.fromkeys(self.knob.flags, self.knob.value if value is None else value)
        # The bench measures all methods on the same old frames afterward: see bench/reference_drift.py.
        flags |= ({} if self.remembers else {"craft.probe_anchors": 0}) | {"craft.log_craft_metrics_freq": 0}
        return {**flags, **self.changes}

    def checkpoint_of(self, value: float | None) -> str:
        """The policy to evaluate, for a value of the knob."""
        if self.knob is not None and value is None:
            value = self.knob.value
        return self.checkpoint.format(value=value)


def as_argv(flags: Mapping[str, object]) -> list[str]:
    """Flags as typed."""
    return [f"--{name}={_typed(value)}" for name, value in flags.items()]


def _typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
