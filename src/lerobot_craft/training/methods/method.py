"""What a method may change of plain fine-tuning, and plain fine-tuning itself."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lerobot_craft.anchors.teacher import Teacher
from lerobot_craft.core import NonFiniteGradientError
from lerobot_craft.core.gradients import loud
from lerobot_craft.core.parameters import whole
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.dry_step import Anchoring
from lerobot_craft.training.run_memory import Remembered


class Stopwatch:
    """Measures one part of a step; `seconds` is None until `stop` follows `start`.

    On a GPU both wait for the device: or the part would be charged for what was launched before it, and not for itself.
    """

    def __init__(self, device: torch.device | Any) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: float | None = None
        self.seconds: float | None = None

    def start(self) -> None:
        """Begin; what was measured before is forgotten."""
        self.seconds, self._began = None, self._now()

    def stop(self) -> None:
        """End; without `start` there is nothing to measure."""
        if self._began is not None:
            self.seconds, self._began = self._now() - self._began, None

    def reset(self) -> None:
        """Forget what was measured."""
        self.seconds = self._began = None

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


class Cost(NamedTuple):
    """Memory that a method holds beyond plain fine-tuning."""

    what: str
    bytes: int


class Knob(NamedTuple):
    """The one number of a method: its setting, the value that the bench takes, and those that a sweep tries."""

    setting: str
    value: float
    grid: tuple[float, ...]


@dataclass(frozen=True)
class MethodParts:
    """What a method adds to a plain step, known before there are weights.

    Attributes:
        rows: Samples in a batch of the task, or in a micro-batch.
        anchoring: The anchor pass, if there is one.
        every: Steps from one anchor pass to the next.
        kept: Bytes on the device from the first step to the last, by what they are.
        host: Bytes in the machine's own memory at most, by what they are; reached once every anchor was visited.
    """

    rows: int
    anchoring: Anchoring | None = None
    every: int = 1
    kept: Mapping[str, int] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What a method works with, made once the policy, its processors and the new data are there.

    Attributes:
        config: `--craft.*`.
        train: lerobot's `TrainPipelineConfig`.
        policy: The student as it is trained, PEFT included, before accelerate wraps it.
        teacher: The policy before fine-tuning. In a fresh run its `policy` is the student itself at step 0, and its
            processors are those of training; in a resumed run its `policy` holds the resumed weights.
        teacher_path: The checkpoint directory that fine-tuning started from, also in a resumed run.
        optimizer: lerobot's, before accelerate wraps it.
        accelerator: accelerate's, for device, ranks and backward.
        resumed: Whether this run goes on from a checkpoint.
        remembered: The memory of the policy before fine-tuning; None where there is none, or it is not wanted.
    """

    config: CraftConfig
    train: Any
    policy: nn.Module
    teacher: Teacher
    teacher_path: str
    optimizer: Any
    accelerator: Any
    resumed: bool = False
    remembered: Remembered | None = None

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.train.seed or 0)

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that the optimizer moves."""
        return [parameter for parameter in self.policy.parameters() if parameter.requires_grad]


class Method:
    """Plain fine-tuning. A method overrides what it changes.

    In this order: `freeze` (before the optimizer exists), `start` (on the whole policy), `prepared` (once it is
    wrapped), then for each step `extend`, `backward`, `clip` and, after the optimizer, `advance`; at the end `finish`.
    """

    name: ClassVar[str] = "naive"
    label: ClassVar[str] = "plain fine-tuning"
    """For tables."""
    held: ClassVar[str | None] = "nothing, this is plain fine-tuning"
    """What it holds, with {settings}; None for a constraint, whose settings are listed one by one."""
    knob: ClassVar[Knob | None] = None
    """Its one number, if it has one."""
    has_multipliers: ClassVar[bool] = False
    """Whether it holds a budget, so that there is a history of multipliers to keep."""
    has_anchors: ClassVar[bool] = False
    """Whether it visits anchors. For others the settings of anchors and of the constraint have no effect."""
    needs_whole_parameters: ClassVar[bool] = False
    """Whether each process must hold all parameters, so that they cannot be sharded."""
    beside_a_batch: ClassVar[str] = ""
    """What else the task's gradient comes from, for the error that names the batch."""
    context: Context

    @classmethod
    def holds(cls, config: CraftConfig) -> str | None:
        """What it holds, in words."""
        return cls.held and cls.held.format(**vars(config))

    @classmethod
    def parts(cls, cfg: Any, config: CraftConfig, policy: nn.Module) -> MethodParts:
        """What it adds to a step, for an estimate.

        Args:
            cfg: lerobot's `TrainPipelineConfig`.
            config: `--craft.*`.
            policy: With shapes and without weights, wrapped and frozen as in training.
        """
        return MethodParts(cfg.batch_size)

    @property
    def old_anchors(self) -> Any | None:
        """Anchors of the old tasks, if it holds any."""
        return None

    @property
    def modules(self) -> Sequence[str]:
        """Modules of the policy in which its gradient is compared with the task's, if it is."""
        return ()

    @property
    def settled(self) -> CraftConfig:
        """The settings with what it has settled, for the records of the run."""
        return self.context.config

    @property
    def per_task(self) -> bool:
        """Whether each old task has a multiplier."""
        return self.context.config.lambda_per_task

    @property
    def every(self) -> int:
        """Steps from one visit of anchors to the next."""
        return self.context.config.retention_freq

    def freeze(self, policy: nn.Module, config: CraftConfig, policy_config: Any) -> None:
        """Set `requires_grad` of what is not to be trained to False."""

    def start(self, context: Context) -> None:
        """Open anchors, copy weights, check what must hold. A `CraftError` here stops before the first step."""
        if self.needs_whole_parameters and context.config.shard:
            raise CraftError(
                f"--craft.method={self.name} needs whole parameters on every process: run it without --craft.shard"
            )
        self.context = context

    def watch(self, probe: Any | None) -> None:
        """After `start`: the anchors on which the drift of the actions is measured, if there are any."""

    def prepared(self) -> None:
        """After accelerate or sharding has the policy, whose parameters may be other objects now."""

    def extend(self, raw: RawBatch, step: int) -> RawBatch:
        """The batch of a step (counted from 0), before the preprocessor."""
        return raw

    def backward(self, loss: Tensor) -> None:
        """Leave the gradient of the step in `.grad`."""
        self.context.accelerator.backward(loud(loss))

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Bound the gradient and return its norm before that; refuse one that is not finite.

        Not under float16, where the scaler tries a scale until gradients overflow, and then leaves the step out.
        """
        if max_norm > 0:
            norm: Tensor = self.context.accelerator.clip_grad_norm_(parameters, max_norm)
        else:
            norm = torch.nn.utils.clip_grad_norm_(parameters, math.inf)
        norm = whole(norm)
        if self.context.accelerator.scaler is None and not math.isfinite(norm.item()):
            raise NonFiniteGradientError("task")
        return norm

    def advance(self) -> None:
        """After the optimizer's step."""

    def metrics(self) -> dict[str, Any]:
        """What the last step measured, by the keys of docs/metrics.md."""
        return {}

    def costs(self) -> list[Cost]:
        """Memory beyond plain fine-tuning, known after `start`."""
        return []

    def compute(self) -> str:
        """Work beyond plain fine-tuning, in words."""
        return "nothing"

    def state_dict(self) -> dict[str, Any]:
        """What must be saved to go on, as JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; called after `start`."""

    def finish(self, save_policy: Any) -> None:
        """After the last step, on the main process; `save_policy(directory)` writes a whole policy checkpoint there."""
