"""Anchors without a cache: frames are read and the teacher is asked at every visit, under fresh noise.

The teacher is the policy with its PEFT adapter switched off; without PEFT, a frozen copy of the policy.
"""

import copy
import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lerobot_craft.anchors.build import Job
from lerobot_craft.anchors.columns import Columns, concatenate, take
from lerobot_craft.anchors.datasets import MadeStates
from lerobot_craft.anchors.loader import AnchorBatch
from lerobot_craft.anchors.manifest import Scale
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.order import by_origin, visit, without
from lerobot_craft.anchors.recipe import digest, most_visits
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.anchors.scales import measure_scales
from lerobot_craft.core.ranks import sum_over_ranks, world_size
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.policies import load_policy
from lerobot_craft.policies import unwrapped
from lerobot_craft.policies.taps import remove_compiled
from lerobot_craft.teacher.fingerprint import fingerprint
from lerobot_craft.teacher.weights import check_weights, require_weights
from lerobot_craft.training.anchoring.asking import adapter_off, ask, policy_inputs, visit_generators
from lerobot_craft.training.anchoring.budget_units import layer_scales_of, units_of
from lerobot_craft.training.anchoring.frames_in_memory import FramesInMemory
from lerobot_craft.training.methods.method import Context, Cost

logger = logging.getLogger(__name__)

_MEASURED_ANCHORS = 256  # for the units; more where that leaves a task with less than four
_MEASURED_TOGETHER = 32
# Of a build, and without effect on what the teacher says.
_OF_A_BUILD = ("inputs", "batch_size", "shard_size")


class OnlineAnchors:
    """Anchors of a plan, each visit's values from the teacher itself."""

    directory: Path | None = None
    stored_bytes = 0

    def __init__(self, context: Context, job: Job) -> None:
        self._job = job
        self._seed = context.seed
        self._student = context.policy
        self._copy = None if hasattr(context.policy, "disable_adapter") else frozen_teacher(context)
        self._frames = FramesInMemory(job, self._make_states())
        self.retained = job.retained.once()  # every visit draws anew
        self._actions = Action(top_k=context.config.top_k)
        self.tasks: Sequence[str] = job.plan.instructions
        self.num_anchors = len(job.plan)
        self.source: str = job.plan.source
        self.instructions = torch.from_numpy(job.plan.instruction)
        self.cross = torch.from_numpy(job.plan.cross)
        self._origins = by_origin(self.cross)
        if job.adapter.output_kind == "logits" and self.retained.needs_fixed:
            logger.warning("an online teacher writes its tokens anew at every visit: --craft.teacher=cache is faster")
        self._scales, self._layer_scales = self._measure()

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> AnchorBatch:
        """The anchors of a step under the noise of that step: a function of the arguments and the seed."""
        most = most_visits(self._job.adapter)
        indices, _, places = visit(self._origins, batch_size, self._seed, step, rank, world_size, most)
        return self._ask(indices, visit_generators(self._seed, step, places.tolist()), self.retained)

    def hold_out(self, indices: Tensor) -> None:
        """Leave these anchors out of all steps."""
        self._origins = without(self._origins, indices)

    def take(self, indices: Tensor) -> AnchorBatch:
        """Chosen anchors, under noise of their own."""
        return self._ask(indices, visit_generators(self._seed, None, indices.tolist()), self.retained)

    def actions(self, indices: Tensor) -> AnchorBatch:
        """The same with the teacher's actions, whatever is retained."""
        return self._ask(indices, visit_generators(self._seed, None, indices.tolist()), self._actions)

    def units(self, loss_type: str) -> list[float]:
        """Per task, the drift that counts as 1."""
        return units_of(self._scales, self.tasks, loss_type)

    def layer_scales(self, loss_type: str) -> dict[str, float] | None:
        """The spread of each layer of hidden states."""
        return layer_scales_of(self._layer_scales, loss_type)

    def costs(self) -> list[Cost]:
        """The frozen copy, and frames that were read."""
        frames = Cost("anchors' frames in memory, at most", self._frames.bytes_at_most(self.num_anchors))
        if self._copy is None:
            return [frames]
        tensors = [*self._copy.parameters(), *self._copy.buffers()]
        return [Cost("frozen copy of the teacher", sum(tensor.nbytes for tensor in tensors)), frames]

    def identity(self) -> dict[str, Any]:
        """The recipe: teacher, frames, instructions and values."""
        recipe = {name: value for name, value in self._job.recipe().items() if name not in _OF_A_BUILD}
        return {"teacher": "online", "recipe": digest(recipe)}

    def _ask(self, indices: Tensor, rngs: Sequence[np.random.Generator], retained: Retained) -> AnchorBatch:
        plan, rows = self._job.plan, indices.numpy()
        parts: list[tuple[npt.NDArray[np.int64], RawBatch, Columns]] = []
        for places in plan.alike(rows):  # these have the same keys, others may not
            raw = self._frames.read(rows[places])
            parts.append((places, raw, self._columns(raw, [rngs[place] for place in places], retained)))
        order = torch.from_numpy(np.concatenate([places for places, _, _ in parts])).argsort()
        raw = {
            name: torch.cat([raw[name] for _, raw, _ in parts]).index_select(0, order)
            for name in self._job.teacher.config.input_features
            if all(name in raw for _, raw, _ in parts)
        }
        raw["task"] = [plan.instructions[index] for index in plan.instruction[rows]]
        columns = take(concatenate(columns for _, _, columns in parts), order)
        return AnchorBatch(raw, columns, self.instructions[indices])

    def _make_states(self) -> MadeStates:
        if self._copy is not None:
            return self._job.make_states(self._copy)
        with adapter_off(self._student):
            return self._job.make_states(unwrapped(self._student))

    def _columns(self, raw: RawBatch, rngs: Sequence[np.random.Generator], retained: Retained) -> Columns:
        teacher, adapter = self._job.teacher, self._job.adapter
        batch = policy_inputs(raw, teacher.preprocessor)
        if self._copy is not None:
            return ask(adapter, self._copy, teacher.config, batch, retained, rngs)
        with adapter_off(self._student):
            return ask(adapter, unwrapped(self._student), teacher.config, batch, retained, rngs)

    def _measure(self) -> tuple[list[Scale], dict[str, dict[str, float]]]:
        """Scales as a cache has them, over the plan's beginning, which is spread over its instructions."""
        plan = self._job.plan
        count = min(self.num_anchors, max(_MEASURED_ANCHORS, 4 * len(self.tasks)))
        measured = []
        for indices in torch.arange(count).split(_MEASURED_TOGETHER):
            columns = dict(self.take(indices).columns)
            columns["instruction"] = self.instructions[indices]
            columns["cross"] = torch.from_numpy(plan.cross[indices.numpy()])
            measured.append(_Measured(columns))
        scales, layers = measure_scales(measured, len(self.tasks), self.retained)  # type: ignore[arg-type]  # reads `columns` only
        agreed = [dataclasses.replace(scale, values=_mean_over_ranks(scale.values)) for scale in scales]
        return agreed, {layer: _mean_over_ranks(values) for layer, values in layers.items()}


@dataclasses.dataclass(frozen=True)
class _Measured:
    columns: Columns


def frozen_teacher(context: Context) -> nn.Module:
    """A copy of the policy before fine-tuning: of the student at its first step, or from the checkpoint again."""
    policy = _load_again(context) if context.resumed else copy.deepcopy(unwrapped(context.policy))
    remove_compiled(policy)
    return policy.requires_grad_(False).eval()


def _load_again(context: Context) -> nn.Module:
    path, teacher = Path(context.teacher_path), context.teacher
    require_weights(path)
    config = copy.copy(teacher.config)  # the settings of training: dtype, device, sizes
    config.pretrained_path = path
    policy = load_policy(config)
    check_weights(policy, path)
    weights = fingerprint(policy, teacher.preprocessor, teacher.postprocessor)["weights"]
    if weights != teacher.fingerprint["weights"]:
        raise CraftError(
            f"the checkpoint in {path} is not the one that this run started from: its weights differ. Copy that one "
            "back, or start a new run"
        )
    return policy


def _mean_over_ranks(values: dict[str, float]) -> dict[str, float]:
    """Devices round differently, and multipliers of all ranks must move alike."""
    if world_size() == 1:
        return values
    summed = sum_over_ranks(torch.tensor(list(values.values()), dtype=torch.float64)) / world_size()
    return dict(zip(values, summed.tolist(), strict=True))
