"""Drift of the policy's actions on a few fixed anchors, whatever is retained: what hidden states only stand for.

Where the policy has a memory, or there is an old dataset, these are real old frames that are kept out of training.
Else, where there are plenty of anchors that cost nothing (frames of the new task under old instructions), a few of them
are kept out. A policy may learn its anchors by heart, and the drift on those that hold it does not show that.
"""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from lerobot_craft.anchors.build import old_instructions
from lerobot_craft.anchors.columns import Column, Columns, Ragged, concatenate, take
from lerobot_craft.anchors.loader import AnchorBatch
from lerobot_craft.anchors.manifest import MANIFEST_FILE, OFFSETS, Manifest, ShardReader
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.anchors.retained import FIXED, OWN_ERROR
from lerobot_craft.anchors.values import looked_up, student_drift
from lerobot_craft.core.parameters import run_in
from lerobot_craft.core.ranks import main_decides
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import write_atomically
from lerobot_craft.lerobot_api.pretrained import autocast
from lerobot_craft.lerobot_api.train_steps import undisturbed_rng
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.training.anchor_batches import policy_inputs, usable_units
from lerobot_craft.training.anchor_source import Anchors, open_anchors
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Context, Method
from lerobot_craft.training.run_memory import Remembered

logger = logging.getLogger(__name__)

PROBE_FILE = "action_probe.safetensors"
_INDEX, _INSTRUCTION = "anchor", "instruction"
_RESAMPLES = 1000
_PLENTY = 20  # times as many as the probe takes
# Real frames of each task that are measured on, and of an old dataset's anchors one of so many.
_FRAMES_PER_TASK, _ONE_OF = 16, 5
_FEWEST = 4  # frames of a task that are measured on, for an interval
UNVERIFIED = (
    "unverified: no real old frame was kept out of training to measure on; `craft remember` or three rollouts would "
    "verify it"
)


class ActionDrift(NamedTuple):
    """How far the actions have moved from the teacher's."""

    per_anchor: dict[str, Tensor]  # of each task, float64 [n]
    verified: bool  # on real old frames that are kept out of training

    @property
    def per_task(self) -> dict[str, float]:
        """The mean of each task."""
        return {task: drifts.mean().item() for task, drifts in self.per_anchor.items()}

    @property
    def mean(self) -> float:
        """Over the tasks."""
        return sum(self.per_task.values()) / len(self.per_anchor)

    def named(self) -> dict[str, Any]:
        """By the keys of docs/metrics.md."""
        return {"action_drift": self.mean} | {f"action_drift/{task}": value for task, value in self.per_task.items()}

    def with_intervals(self) -> dict[str, Any]:
        """The same, with 95 % intervals that resample the anchors of each task, and whether these are real frames.

        Fewer than four anchors of a task say nothing of how they vary: it has no interval then.
        """
        resampled = {
            task: _resampled_means(drifts) for task, drifts in self.per_anchor.items() if len(drifts) >= _FEWEST
        }
        spread = {f"/{task}": means for task, means in resampled.items()}
        if len(resampled) == len(self.per_anchor):
            spread[""] = torch.stack(list(resampled.values())).mean(dim=0)
        values: dict[str, Any] = self.named() | {"verified": self.verified}
        for name, means in spread.items():
            low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=means.dtype)).tolist()
            values |= {f"action_drift_low{name}": low, f"action_drift_high{name}": high}
        return values


def _resampled_means(drifts: Tensor) -> Tensor:
    """Means of 1,000 samples with replacement, [1000]; the same ones for the same drifts."""
    chosen = torch.randint(len(drifts), (_RESAMPLES, len(drifts)), generator=torch.Generator().manual_seed(0))
    return drifts[chosen].mean(dim=1)


class ActionProbe:
    """Fixed anchors with the teacher's actions.

    Attributes:
        tasks: Old tasks that they belong to.
        num_anchors: How many.
        in_own_error: Whether 1 is the teacher's own error on that task; else drifts are absolute.
        held_out: Whether no step visits them.
        real: Whether they are frames of old tasks that are kept out of training; else some or all are made up, or were
            trained on.
    """

    def __init__(
        self,
        context: Context,
        anchors: Anchors,
        batches: Sequence[AnchorBatch],
        *,
        held_out: bool = False,
        real: bool = False,
        same_units: Anchors | None = None,
    ) -> None:
        self._adapter = adapter_for(context.teacher.config)
        self._config = context.teacher.config
        self._preprocessor = context.teacher.preprocessor
        self._retained = Action(top_k=context.config.top_k)
        self._loss_type = self._retained.loss_types(self._adapter)[0]
        self.tasks = anchors.tasks
        self._batches = batches
        self._images = anchors.images
        self._units = self._shared_units(self._own_errors(anchors), same_units)
        self.num_anchors = sum(len(batch) for batch in batches)
        self.in_own_error = self._units is not None
        self.held_out = held_out
        self.real = real

    @property
    def measured_on(self) -> str:
        """How far its numbers can be believed, in words."""
        if self.real:
            return f"measured on {self.num_anchors} real frames kept out of training"
        return UNVERIFIED

    @classmethod
    def prepare(cls, context: Context, anchors: Anchors, output_dir: Path) -> "ActionProbe | None":
        """The probe of a run: made and saved when it starts, read when it goes on; None where there is none to have.

        Raises:
            CraftError: A resumed run has lost its probe, and nobody can be asked again.
        """
        wanted = min(context.config.probe_anchors, anchors.num_anchors)
        if wanted == 0:
            return None
        real = spared(anchors)
        plenty = _are_plenty(anchors, wanted)
        among = anchors.cross.nonzero().squeeze(1) if plenty else torch.arange(anchors.num_anchors)
        chosen = real if len(real) else among[evenly(anchors.instructions[among], wanted)]
        found = _asked(context, anchors, chosen, output_dir / PROBE_FILE)
        if found is None:
            return None
        chosen, batches = found
        if held_out := plenty or bool(len(real)):
            anchors.hold_out(chosen)
        return cls(context, anchors, batches, held_out=held_out, real=bool(len(real)))

    @classmethod
    def of_kept_frames(
        cls, context: Context, anchors: Anchors, output_dir: Path, same_units: Anchors | None
    ) -> "ActionProbe | None":
        """The probe of a run on real old frames, which are in no other anchors.

        Args:
            context: The run.
            anchors: Frames that are kept out of training.
            output_dir: Of the run.
            same_units: Anchors that the method holds, whose units are then these numbers' too.
        """
        wanted = max(context.config.probe_anchors, _FRAMES_PER_TASK * len(anchors.tasks))
        chosen = evenly(anchors.instructions, min(wanted, anchors.num_anchors))
        found = _asked(context, anchors, chosen, output_dir / PROBE_FILE)
        if found is None:
            return None
        _, batches = found
        return cls(context, anchors, batches, held_out=True, real=True, same_units=same_units)

    def _shared_units(self, own: list[float] | None, other: Anchors | None) -> list[float] | None:
        """Units of the anchors that are held: measured on more frames, and the same as the budget's."""
        if other is None or other.retained.mode != Action.mode or own is None:
            return own
        known = dict(zip(other.tasks, other.units(self._loss_type), strict=True))
        return [known.get(task, unit) for task, unit in zip(self.tasks, own, strict=True)]

    def measure(self, policy: Any) -> ActionDrift:
        """Drift of a policy's actions from the teacher's. Neither its mode nor any random generator changes."""
        policy = unwrapped(policy)
        drifts = []
        with torch.no_grad(), undisturbed_rng(), mode(policy, train=self._adapter.train_mode):
            for anchors in self._batches:
                batch = policy_inputs(anchors.raw, self._preprocessor)
                drift_of = functools.partial(
                    student_drift, self._adapter, policy, batch, anchors.columns, self._retained, self._loss_type
                )
                known = looked_up(self._images, anchors.rows, self._retained, self._adapter, policy)
                with autocast(self._config), known:
                    drift = run_in(policy, drift_of)
                drifts.append(drift.double().cpu())
        return self._per_task(torch.cat(drifts))

    def _per_task(self, drifts: Tensor) -> ActionDrift:
        instruction = torch.cat([batch.instruction for batch in self._batches])
        per_anchor = {}
        for index in instruction.unique().tolist():
            unit = 1.0 if self._units is None else self._units[index]
            per_anchor[self.tasks[index]] = drifts[instruction == index] / unit
        return ActionDrift(per_anchor, self.real)

    def _own_errors(self, anchors: Anchors) -> list[float] | None:
        if anchors.retained.mode == Action.mode:
            return anchors.units(self._loss_type)
        name = f"{OWN_ERROR}{self._loss_type}"
        columns = [batch.columns.get(name) for batch in self._batches]
        known = [column for column in columns if isinstance(column, Tensor)]
        if len(known) < len(columns):
            return None
        errors, instruction = torch.cat(known).double(), torch.cat([batch.instruction for batch in self._batches])
        present = instruction.unique().tolist()
        means = {self.tasks[index]: errors[instruction == index].mean().item() for index in present}
        units = usable_units(means, self._loss_type)
        return [units.get(task, 1.0) for task in self.tasks]


def _asked(
    context: Context, anchors: Anchors, chosen: Tensor, path: Path
) -> tuple[Tensor, Sequence[AnchorBatch]] | None:
    """Anchors of a probe with the teacher's actions: those of the run's file when it goes on, else `chosen`, asked now.

    None where the teacher's actions cannot be had.
    """
    size = context.config.anchor_batch_size
    if context.resumed and main_decides(path.exists):
        return _read(path, anchors, size)
    batches = [anchors.actions(indices) for indices in chosen.split(size)]
    known = [batch for batch in batches if batch is not None]
    if len(known) < len(batches):
        _explain_absence(context, path)
        return None
    if context.accelerator.is_main_process:
        _write(path, chosen, known)
    return chosen, known


def spared(anchors: Anchors) -> Tensor:
    """Real old frames that can be kept out of training: a fifth of each task's that has enough; sorted, int64 [n]."""
    chosen: list[int] = []
    for task in range(len(anchors.tasks)):
        rows = ((anchors.instructions == task) & ~anchors.cross).nonzero().squeeze(1)
        count = min(len(rows) // _ONE_OF, _FRAMES_PER_TASK)
        if count < _FEWEST:
            continue
        places = torch.linspace(0, len(rows) - 1, count + 2).round().long()[1:-1]
        chosen += rows[places].tolist()
    return torch.tensor(sorted(chosen), dtype=torch.long)


def _are_plenty(anchors: Anchors, wanted: int) -> bool:
    """Whether so many can be spared of those that were made from the new task's frames."""
    return int(anchors.cross.sum()) >= _PLENTY * wanted


def evenly(instructions: Tensor, count: int) -> Tensor:
    """The first anchors of each task in turn, until there are `count`: sorted indices, int64 [count]."""
    of_task = [(instructions == task).nonzero().squeeze(1).tolist() for task in instructions.unique().tolist()]
    in_turn = sorted(
        (place, task, index) for task, indices in enumerate(of_task) for place, index in enumerate(indices)
    )
    return torch.tensor(sorted(index for _, _, index in in_turn[:count]))


def _explain_absence(context: Context, path: Path) -> None:
    if context.resumed:
        raise CraftError(
            f"{path} is not there any more: it holds the teacher's actions, which a resumed run cannot compute again. "
            "Copy it back, or go on without the drift of the actions: --craft.probe_anchors=0"
        )
    logger.warning(
        "the drift of the actions is not measured: %s draws its noise around demonstrated actions, and a cache of %s "
        "keeps none (--craft.retention_mode=action and --craft.teacher=online measure it)",
        context.teacher.config.type,
        context.config.retention_mode,
    )


def _write(path: Path, chosen: Tensor, batches: Sequence[AnchorBatch]) -> None:
    columns = concatenate(_of_actions(batch.columns) for batch in batches)
    columns |= {_INDEX: chosen, _INSTRUCTION: torch.cat([batch.instruction for batch in batches])}
    tensors: dict[str, Tensor] = {}
    for name, column in columns.items():
        tensors[name] = column.values if isinstance(column, Ragged) else column
        if isinstance(column, Ragged):
            tensors[name + OFFSETS] = column.offsets
    write_atomically(path, save({name: tensor.contiguous() for name, tensor in tensors.items()}))


def _of_actions(columns: Columns) -> Columns:
    """Without what a cache keeps beside them."""
    return {
        name: column
        for name, column in columns.items()
        if name in ("target", "kept") or name.startswith((FIXED, OWN_ERROR))
    }


def _read(path: Path, anchors: Anchors, batch_size: int) -> tuple[Tensor, list[AnchorBatch]]:
    try:
        columns: Columns = dict(ShardReader(path).columns)
        chosen, instruction = (_dense(columns.pop(name)) for name in (_INDEX, _INSTRUCTION))
        fits = 0 <= int(chosen.min()) <= int(chosen.max()) < anchors.num_anchors
        if not fits or not torch.equal(anchors.instructions[chosen], instruction):
            raise CraftError("it belongs to other anchors")
    except (CraftError, KeyError, TypeError) as error:
        raise CraftError(
            f"{path} cannot be used ({error}): copy the run's own one back, or go on without the drift of the actions: "
            "--craft.probe_anchors=0"
        ) from error
    batches = []
    for rows in torch.arange(len(chosen)).split(batch_size):
        raw = anchors.take(chosen[rows]).raw
        batches.append(AnchorBatch(raw, take(columns, rows), instruction[rows], rows=chosen[rows].tolist()))
    return chosen, batches


def _dense(column: Column) -> Tensor:
    if isinstance(column, Ragged):
        raise TypeError("expected a column with rows of one shape")
    return column


_OWN_CACHE = "probe_anchors"


def make_probe(method: Method, output_dir: Path) -> ActionProbe | None:
    """The probe of a run; None where it is not wanted or nothing is known of the old tasks."""
    context = method.context
    config = context.config
    if config.probe_anchors == 0:
        return None
    anchors: Anchors | None = method.old_anchors
    kept = None if context.remembered is None else context.remembered.to_measure()
    if (anchors is None or kept is not None) and config.normalization != "keep":
        logger.warning(
            "the drift of the actions is not measured: with --craft.normalization=%s the policy acts differently "
            "before its first step",
            config.normalization,
        )
        return None
    if kept is not None:
        return ActionProbe.of_kept_frames(context, _kept_anchors(context, kept, output_dir), output_dir, anchors)
    if anchors is None:
        anchors = _anchors(context, output_dir)
    return None if anchors is None else ActionProbe.prepare(context, anchors, output_dir)


def _kept_anchors(context: Context, kept: Remembered, output_dir: Path) -> Anchors:
    """The teacher's actions on frames of the memory that are kept out of training, asked once and kept with the run."""
    own = dataclasses.replace(
        _own_cache_of_actions(context.config, output_dir),
        anchor_source="dataset",
        old_dataset=DatasetFlags(),
        old_instructions=None,
        num_anchors=None,
        draw_from="auto",
    )
    return open_anchors(dataclasses.replace(context, config=own, remembered=kept))


def _own_cache_of_actions(config: CraftConfig, output_dir: Path) -> CraftConfig:
    """The settings of a small cache of actions in the run's own directory."""
    return dataclasses.replace(
        config.of_actions(),
        teacher="cache",
        anchor_cache_dir=output_dir / _OWN_CACHE,
        old_frames=None,
        walked_states=0.0,
        drawn_states=0.0,
        loss_type=None,
    )


def _anchors(context: Context, output_dir: Path) -> Anchors | None:
    """Those of a cache that was given, or a few of the old datasets, asked once and kept with the run."""
    config = context.config
    given = config.anchor_cache_dir
    if given is not None and (given / MANIFEST_FILE).exists():
        of_cache = dataclasses.replace(
            config, retention_mode=Manifest.load(given).kind, teacher="cache", loss_type=None
        )
        return open_anchors(dataclasses.replace(context, config=of_cache))
    old_frames = bool(config.old_dataset.repo_id) and config.source(reads_instruction=False) == "dataset"
    if not (config.names_an_origin if adapter_for(context.teacher.config).reads_instruction else old_frames):
        return None
    own = dataclasses.replace(
        _own_cache_of_actions(config, output_dir),
        num_anchors=max(config.probe_anchors, 2 * _num_tasks(config)),  # old and new frames of each
    )
    return open_anchors(dataclasses.replace(context, config=own))


def _num_tasks(config: CraftConfig) -> int:
    return len(old_instructions(config))
