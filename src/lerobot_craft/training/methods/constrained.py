"""CRaFT itself: fine-tuning under the constraint that the student's values on the anchors stay within a budget."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lerobot_craft.anchors.loader import AnchorBatch, retained_of
from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.recipe import num_anchors
from lerobot_craft.anchors.retained import Retained, mode_named
from lerobot_craft.anchors.values import looked_up, student_drift
from lerobot_craft.core import (
    AnchorDrift,
    AnchorPart,
    AnchorReport,
    Dual,
    Multipliers,
    RetentionStep,
    StepReport,
    Surgery,
)
from lerobot_craft.core.parameters import run_in
from lerobot_craft.core.precision import coarsest
from lerobot_craft.core.ranks import sum_over_ranks, world_size
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.features import frame_bytes
from lerobot_craft.policies import PolicyAdapter, adapter_for, mode, unwrapped
from lerobot_craft.training.action_drift import ActionDrift, ActionProbe, spared
from lerobot_craft.training.anchor_batches import anchor_bytes, policy_inputs
from lerobot_craft.training.anchor_source import Anchors, mode_of, open_all
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.dry_step import Anchoring
from lerobot_craft.training.methods.freeze import freeze_readout
from lerobot_craft.training.methods.method import Context, Cost, Knob, Method, MethodParts, Stopwatch
from lerobot_craft.training.start_checks import StartReport, check_start

_MOST = 10  # modules: a table of more is not read
_LARGE = 0.5  # of all trained values in one module: it hides what is inside it


def module_names(sizes: Sequence[tuple[str, int]]) -> list[str]:
    """For each parameter the module that it counts to.

    Beginning with the whole policy, the module that holds more than half of the values is taken apart into its
    children, until there is none or there would be too many modules. What all names have in common is left out.

    Args:
        sizes: Dotted name of each parameter, and how many values it has.
    """
    paths = [tuple(name.split(".")[:-1]) for name, _ in sizes]
    modules: list[tuple[str, ...]] = [() for _ in paths]
    while True:
        held: dict[tuple[str, ...], int] = {}
        for module, (_, size) in zip(modules, sizes, strict=True):
            held[module] = held.get(module, 0) + size
        largest = max(held, key=lambda module: held[module])
        finer = [
            path[: len(module) + 1] if module == largest else module
            for module, path in zip(modules, paths, strict=True)
        ]
        if finer == modules or held[largest] <= _LARGE * sum(held.values()) or len(set(finer)) > _MOST:
            break
        modules = finer
    common = _common(sorted(set(modules)))
    return [".".join(module[common:]) or "itself" for module in modules]


def _common(modules: Sequence[tuple[str, ...]]) -> int:
    """How many leading names all modules share; of a single module all but its own."""
    if len(modules) == 1:
        return max(len(modules[0]) - 1, 0)
    first, last = modules[0], modules[-1]
    shared = [a == b for a, b in zip(first, last, strict=False)]
    return shared.index(False) if False in shared else len(shared)


# The drift on frames that are kept out is measured this often in a run, and not more often than every so many steps.
_MEASUREMENTS, _STEPS_BETWEEN = 25, 5


class Constrained(Method):
    """min L_task subject to L_ret <= eps, by gradient surgery and multipliers: docs/method.md."""

    name: ClassVar[str] = "craft"
    label: ClassVar[str] = "CRaFT"
    held: ClassVar[str | None] = None
    knob: ClassVar[Knob | None] = Knob("initial_lambda", 3.0, (0.3, 1.0, 3.0, 10.0))
    has_multipliers: ClassVar[bool] = True
    has_anchors: ClassVar[bool] = True
    anchors: Anchors
    start_report: StartReport
    _step: RetentionStep
    _report: StepReport
    _held_out: ActionProbe | None = None
    _measured: ActionDrift | None = None

    @classmethod
    def parts(cls, cfg: Any, config: CraftConfig, policy: nn.Module) -> MethodParts:
        """The anchor pass, a teacher that is online, and the anchors in the machine's own memory."""
        adapter, student = adapter_for(cfg.policy), unwrapped(policy)
        (retained, manifest), *others = cls.retained(config, adapter, student)
        config = config.divided(cfg.batch_size)
        kept = {}
        if config.teacher == "online" and not hasattr(policy, "disable_adapter"):
            kept["frozen copy of the teacher"] = sum(t.nbytes for t in (*student.parameters(), *student.buffers()))
        asked = num_anchors(config.num_anchors, config.old_frames, adapter)
        pixels, numbers = frame_bytes(cfg.policy)
        anchoring = Anchoring(
            adapter,
            retained,
            config.loss_type,
            config.anchor_batch_size,
            manifest.num_anchors if manifest else asked,
            looks_up_images=not config.shard,
            beside=tuple(other for other, _ in others),
        )
        return MethodParts(
            config.new_samples(cfg.batch_size),
            anchoring,
            config.retention_freq,
            kept,
            anchor_bytes(config.teacher == "online", manifest, asked, pixels, numbers),
        )

    @classmethod
    def retained(
        cls, config: CraftConfig, adapter: PolicyAdapter, policy: nn.Module
    ) -> list[tuple[Retained, Manifest | None]]:
        """What is retained under each mode, and the manifest of its cache if there is one."""
        found: list[tuple[Retained, Manifest | None]] = []
        for own in config.by_mode():
            directory = own.anchor_cache_dir
            if own.teacher == "cache" and directory is not None and (directory / MANIFEST_FILE).exists():
                manifest = Manifest.load(directory)
                found.append((retained_of(manifest, adapter, policy), manifest))
            else:
                found.append((own.retained(adapter, policy).once(), None))
        return found

    @property
    def old_anchors(self) -> Anchors | None:
        """What it holds."""
        return self.anchors

    @property
    def modules(self) -> Sequence[str]:
        """Where the cosine of the two gradients is taken too."""
        return list(dict.fromkeys(self._modules))

    def freeze(self, policy: nn.Module, config: CraftConfig, policy_config: Any) -> None:
        """The readout, where the mode asks for it: a loss on hidden states of every token does not hold it."""
        if _freezes_readout(config) if config.freeze_readout is None else config.freeze_readout:
            freeze_readout(policy, adapter_for(policy_config))

    def start(self, context: Context) -> None:
        """Open or build the anchors, check that the student is the teacher and that it can be held."""
        super().start(context)
        config = context.config
        if config.normalization != "keep":
            raise CraftError(
                f"--craft.normalization={config.normalization} changes what the student sees and does before the first "
                f"step, so it would not be the teacher that --craft.method={config.method} holds it to: use keep"
            )
        self._adapter = adapter_for(context.teacher.config)
        self.anchors, each = open_all(self.of_anchors(context))
        # A policy that answers in tokens acts differently at drifts far below 1 (decision 0023): its floor stays.
        if self.measures_real_frames() and self._adapter.output_kind != "logits":
            config = config.following()
            self.context = dataclasses.replace(context, config=config)
        self._parts = [_Part.of(config, anchors, self._adapter) for anchors in each]
        reports = [check_start(context, part.anchors, part.loss_type) for part in self._parts]
        self.start_report = max(reports, key=lambda report: report.held)
        self._tasks = tuple(self.anchors.tasks) if self.per_task else ("all",)
        named = context.policy.named_parameters()
        self._modules = module_names([(name, p.numel()) for name, p in named if p.requires_grad])
        self._step = RetentionStep(
            context.trained,
            context.optimizer,
            Multipliers(self.dual(config), self._groups()),
            surgery=self.surgery(config, context.train.optimizer.grad_clip_norm),
            epsilon=functools.partial(config.epsilon, total_steps=context.train.steps),
            units=self._units(),
            retention_freq=self.every,
            backward=context.accelerator.backward,
            parts=self._modules,
        )
        self._stopwatch = Stopwatch(context.accelerator.device)
        self._gradient_bytes = sum(parameter.nbytes for parameter in self._step.parameters)

    def of_anchors(self, context: Context) -> Context:
        """The context that anchors are opened with."""
        return context

    def dual(self, config: CraftConfig) -> Dual:
        """How the multipliers move."""
        return config.dual()

    def surgery(self, config: CraftConfig, clip: float) -> Surgery:
        """How the two gradients become one."""
        return config.surgery(clip)

    def measures_real_frames(self) -> bool:
        """Whether the drift of what it retains is measured on real old frames that are kept out of training."""
        config, remembered = self.context.config, self.context.remembered
        if config.modes != (Action.mode,) or config.probe_anchors == 0:
            return False
        return len(spared(self.anchors)) > 0 if remembered is None else remembered.measured is not None

    def watch(self, probe: ActionProbe | None) -> None:
        """Let the multipliers follow the drift on real old frames that are kept out of training, if it is measured."""
        if probe is not None and probe.real and self.measures_real_frames():
            self._held_out = probe
            self._step.follows_anchors = False

    def prepared(self) -> None:
        """Go on with the parts of a sharded policy's parameters."""
        self._step.parameters = list[Tensor](self.context.trained)

    def _units(self) -> list[float] | None:
        if self.context.config.epsilon_unit == "absolute":
            return None
        return [unit for part in self._parts for unit in part.units(len(self._tasks), self.per_task)]

    def _groups(self) -> tuple[str, ...]:
        """The constraints: one per task and, where several modes are retained, per mode."""
        if len(self._parts) == 1:
            return self._tasks
        return tuple(f"{part.anchors.retained.mode}: {task}" for part in self._parts for task in self._tasks)

    def backward(self, loss: Tensor) -> None:
        """Task backward, then on every K-th step the anchors' backward and the merge of both."""
        self._stopwatch.reset()
        self._report = self._step.backward(lambda: loss, self._drift)
        self._stopwatch.stop()
        if self._report.anchor is not None:
            self._gradient_bytes = self._report.anchor.retention_bytes

    def _drift(self) -> list[AnchorPart]:
        """The anchors of this step, on the host; the student's values of each micro-batch follow one by one."""
        self._stopwatch.start()
        anchor_step = self._step.step // self.every
        return [self._micro_batch(anchor_step, number) for number in range(self.context.config.accumulate)]

    def _micro_batch(self, anchor_step: int, number: int) -> AnchorPart:
        batches = [self._batch_of(part.anchors, anchor_step, number) for part in self._parts]
        groups = torch.cat([self._groups_of(batch, index) for index, batch in enumerate(batches)])

        def drift() -> AnchorDrift:
            found = [self._drift_of(part, batch) for part, batch in zip(self._parts, batches, strict=True)]
            return AnchorDrift(torch.cat([drift for drift, _ in found]), groups, found[0][1])

        return AnchorPart(groups, drift)

    def _groups_of(self, anchors: AnchorBatch, part: int) -> Tensor:
        of_task = anchors.instruction if self.per_task else torch.zeros(len(anchors), dtype=torch.long)
        return of_task + part * len(self._tasks)

    def _drift_of(self, part: "_Part", anchors: AnchorBatch) -> tuple[Tensor, torch.dtype]:
        """The drift of each anchor [B], and the dtype it was computed in."""
        context = self.context
        batch = policy_inputs(anchors.raw, context.teacher.preprocessor)
        policy = unwrapped(context.policy)
        drift = functools.partial(
            student_drift,
            self._adapter,
            policy,
            batch,
            anchors.columns,
            part.anchors.retained,
            part.loss_type,
            draw=anchors.draw,
            layer_scales=part.layer_scales,
        )
        known = looked_up(part.anchors.images, anchors.rows, part.anchors.retained, self._adapter, policy)
        with mode(policy, train=self._adapter.train_mode), context.accelerator.autocast(), known:
            per_sample = run_in(policy, drift)
            dtype = _computed_in(policy, per_sample.device.type)
        return per_sample, dtype

    def _batch_of(self, anchors: Anchors, anchor_step: int, number: int) -> AnchorBatch:
        """A micro-batch of the n-th anchor step, counted from 0: micro-batches share a step as ranks do."""
        config, accelerator = self.context.config, self.context.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        return anchors.batch(anchor_step, config.anchor_batch_size, number * world + rank, config.accumulate * world)

    def clip(self, parameters: Any, max_norm: float) -> Tensor:
        """Norm of the merged gradient; merging has bounded it already."""
        return torch.tensor(self._report.merged_norm)

    def advance(self) -> None:
        """Move the multipliers."""
        self._step.advance(self._report)
        self._measured = None
        every = max(_STEPS_BETWEEN, self.context.train.steps // _MEASUREMENTS)
        if self._held_out is not None and self._step.step % every == 0:
            self._step.measured(self._drift_on_held_out(self._held_out))

    def _drift_on_held_out(self, probe: ActionProbe) -> list[float | None]:
        """Per constraint, the same on every rank; None where no frame of the task is kept out."""
        found = self._measured = probe.measure(self.context.policy)
        drifts = [found.per_task.get(task) for task in self._tasks] if self.per_task else [found.mean]
        known = torch.tensor([math.nan if drift is None else drift for drift in drifts], dtype=torch.float64)
        shared = sum_over_ranks(known) / world_size()
        return [None if math.isnan(drift) else drift for drift in shared.tolist()]

    def metrics(self) -> dict[str, Any]:
        """Of the last step; on steps between anchors only the task's norm."""
        values: dict[str, Any] = {"mode": mode_of(self.anchors), "task_norm": self._report.task_norm}
        if self._measured is not None:
            values |= self._measured.named()
        anchor = self._report.anchor
        if anchor is None:
            return values
        values |= {
            "retention_loss": anchor.retention_loss,
            "lambda": sum(anchor.lambdas) / len(anchor.lambdas),
            "epsilon": anchor.epsilon,
            "conflict": anchor.conflict,
            "bounded": anchor.bounded,
            "merged_norm": self._report.merged_norm,
        }
        if anchor.cos is not None:  # else the two gradients were added, and never held apart
            values |= {"dot": anchor.dot, "cos": anchor.cos, "retention_norm": anchor.retention_norm}
        values |= {f"cos/{module}": cos for module, cos in anchor.part_cosines.items()}
        if self._stopwatch.seconds is not None:
            values["retention_s"] = self._stopwatch.seconds
        if len(self._parts) > 1:
            values |= self._by_mode(anchor)
        if not self.per_task:
            return values
        for task, (loss, multiplier) in zip(self._tasks, self._worst(anchor), strict=True):
            values[f"lambda/{task}"] = multiplier
            if loss is not None:
                values[f"retention_loss/{task}"] = loss
        return values

    def _worst(self, anchor: AnchorReport) -> list[tuple[float | None, float]]:
        """Drift and multiplier of each task, under the mode that has moved most."""
        count = len(self._tasks)
        found = list(zip(anchor.group_losses, anchor.lambdas, strict=True))
        return [max(found[task::count], key=lambda pair: pair[0] or 0.0) for task in range(count)]

    def _by_mode(self, anchor: AnchorReport) -> dict[str, float]:
        count = len(self._tasks)
        values = {}
        for index, part in enumerate(self._parts):
            mode, own = part.anchors.retained.mode, slice(index * count, (index + 1) * count)
            known = [loss for loss in anchor.group_losses[own] if loss is not None]
            values[f"mode_lambda/{mode}"] = sum(anchor.lambdas[own]) / count
            values[f"mode_loss/{mode}"] = sum(known) / len(known)
        return values

    def costs(self) -> list[Cost]:
        """One more gradient (as large as it was found to be, before that at most), and what the anchors hold."""
        return [Cost("retention gradient", self._gradient_bytes), *self.anchors.costs()]

    def compute(self) -> str:
        """An anchor batch now and then."""
        config = self.context.config
        when = "each step" if self.every == 1 else f"every {self.every}th step"
        asked = ", and the teacher's forward of the same" if config.teacher == "online" else ""
        return f"forward and backward of {config.anchor_batch_size * config.accumulate} anchors in {when}{asked}"

    def state_dict(self) -> dict[str, Any]:
        """Step, multipliers, and which anchors they belong to."""
        return {"retention": self._step.state_dict(), "anchors": self.anchors.identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse other anchors than those of the saved run."""
        if state.get("anchors") != self.anchors.identity():
            raise CraftError(
                "the anchors are not those that the saved run was trained with: give its cache as "
                "--craft.anchor_cache_dir, or start a new run"
            )
        self._step.load_state_dict(state.get("retention", {}))


@dataclasses.dataclass(frozen=True)
class _Part:
    """What is retained under one mode.

    Attributes:
        anchors: With the teacher's values of this mode.
        loss_type: How they are compared.
        layer_scales: By which each layer's drift is divided; None: by nothing.
    """

    anchors: Anchors
    loss_type: str
    layer_scales: dict[str, float] | None

    @classmethod
    def of(cls, config: CraftConfig, anchors: Anchors, adapter: PolicyAdapter) -> "_Part":
        loss_type = config.loss_type or anchors.retained.loss_types(adapter)[0]
        relative = len(anchors.retained.layers) > 1 if config.relative is None else config.relative
        return cls(anchors, loss_type, anchors.layer_scales(loss_type) if relative else None)

    def units(self, tasks: int, per_task: bool) -> list[float]:
        """The drift that counts as 1, of each task or of all."""
        units = self.anchors.units(self.loss_type)
        if self.layer_scales is not None:  # the drift is relative already, and its spread is 1 by its definition
            return [1.0] * tasks
        return units if per_task else [sum(units) / len(units)]


def _computed_in(policy: nn.Module, device_type: str) -> torch.dtype:
    """The coarsest dtype of its frozen and trained weights, and of autocast where that is on."""
    autocast = [torch.get_autocast_dtype(device_type)] if torch.is_autocast_enabled(device_type) else []
    return coarsest([*(parameter.dtype for parameter in policy.parameters()), *autocast])


def _freezes_readout(config: CraftConfig) -> bool:
    """As the mode has it, by the flags or by the cache that they name. Actions hold the readout: not beside them."""

    def held() -> dict[str, Any]:
        directory = config.anchor_cache_dir
        return {} if directory is None or not (directory / MANIFEST_FILE).exists() else Manifest.load(directory).values

    return len(config.modes) == 1 and mode_named(config.retention_mode).freezes_readout(config, held)
