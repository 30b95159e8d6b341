"""Batches of anchors in training, from a cache on disk or from the teacher at every visit.

Asking the teacher while its student is trained: no gradients, the mode of anchors, the precision of training.

Anchors without a cache: frames are read and the teacher is asked at every visit, under fresh noise.

The teacher is the policy with its PEFT adapter switched off; without PEFT, a frozen copy of the policy.
"""

import copy
import dataclasses
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lerobot_craft.anchors.build import Job
from lerobot_craft.anchors.columns import Columns, concatenate, take
from lerobot_craft.anchors.loader import (
    DECODED_BYTES,
    AnchorBatch,
    AnchorLoader,
    by_origin,
    retained_of,
    visit,
    without_anchors,
)
from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest, Scale
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.observations import NOTHING_MADE, STATE, MadeStates, as_anchors
from lerobot_craft.anchors.recipe import digest, most_visits
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.anchors.teacher import check_weights, fingerprint, normalizer_stats, require_weights
from lerobot_craft.anchors.values import looked_up, measure_scales, teacher_columns
from lerobot_craft.core.ranks import sum_over_ranks, world_size
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import sha256_of
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.pretrained import PolicyConfig, autocast, load_policy
from lerobot_craft.lerobot_api.processors import Processor, policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import Batch, PolicyAdapter, adapter_for, mode, unwrapped
from lerobot_craft.policies.taps import KnownImages, remove_compiled
from lerobot_craft.training.methods.method import Context, Cost


def policy_inputs(raw: RawBatch, preprocessor: Processor) -> Batch:
    """What the policy sees of raw anchors, whose images are uint8."""
    cameras = [name for name, value in raw.items() if isinstance(value, Tensor) and value.dtype == torch.uint8]
    return policy_batch(raw, cameras, preprocessor)


def ask(
    adapter: PolicyAdapter,
    policy: Any,
    config: PolicyConfig,
    batch: Batch,
    retained: Retained,
    rngs: Sequence[np.random.Generator],
) -> Columns:
    """What the policy makes of a batch, as rows of a cache; noise and time of row i come from `rngs[i]`."""
    with torch.no_grad(), mode(policy, train=adapter.train_mode), autocast(config):
        return teacher_columns(adapter, policy, batch, retained, rngs)


@contextmanager
def adapter_off(policy: nn.Module) -> Iterator[None]:
    """The policy before fine-tuning, within the context: its PEFT adapter is switched off, if it has one."""
    switch = getattr(policy, "disable_adapter", None)
    if switch is None:
        yield
        return
    # PEFT freezes adapters as it switches them off, and then makes all of them trainable, also those that were not.
    trained = [(parameter, parameter.requires_grad) for parameter in policy.parameters()]
    try:
        with switch():
            yield
    finally:
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def visit_generators(seed: int, visit: int | None, rows: Sequence[int]) -> list[np.random.Generator]:
    """One random generator per row of a visit, or (None) of what is measured outside of any visit."""
    # numpy takes (seed, 1) and (seed, 1, 0) for the same seed, so no last number is 0.
    return [np.random.default_rng((seed, 0 if visit is None else visit + 1, row + 1)) for row in rows]


logger = logging.getLogger(__name__)

_SMALLEST = 1e-12


def units_of(scales: Sequence[Scale], tasks: Sequence[str], loss_type: str) -> list[float]:
    """The unit of each task under a loss."""
    _require_loss_type(loss_type, (scale.values for scale in scales))
    measured = dict(zip(tasks, (scale.values[loss_type] for scale in scales), strict=True))
    return list(usable_units(measured, loss_type).values())


def usable_units(measured: Mapping[str, float], loss_type: str) -> dict[str, float]:
    """Units by task; a task whose own is 0 or not finite gets the mean of the others', with a warning."""
    units, unusable = _usable(measured)
    if unusable:
        logger.warning(
            "the anchors give no unit for the budget of %s (%s is %g there: too few anchors, or all alike); %g is used",
            "; ".join(unusable),
            loss_type,
            measured[unusable[0]],
            units[unusable[0]],
        )
    return units


def layer_scales_of(scales: Mapping[str, Mapping[str, float]] | None, loss_type: str) -> dict[str, float] | None:
    """The spread of each layer under a loss; None where no hidden states are retained."""
    if not scales:
        return None
    _require_loss_type(loss_type, scales.values())
    spreads, unusable = _usable({layer: values[loss_type] for layer, values in scales.items()})
    if unusable:
        logger.warning("layers %s do not vary over the anchors: their drift is not scaled up", ", ".join(unusable))
    return spreads


def _usable(measured: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    good = [value for value in measured.values() if _SMALLEST <= value < math.inf]
    instead = sum(good) / len(good) if good else 1.0
    unusable = [name for name, value in measured.items() if not _SMALLEST <= value < math.inf]
    return {name: instead if name in unusable else value for name, value in measured.items()}, unusable


def _require_loss_type(loss_type: str, measured: Iterable[Mapping[str, float]]) -> None:
    for values in measured:
        if loss_type not in values:
            raise CraftError(
                f"the anchors have no unit for --craft.loss_type={loss_type}: use {' or '.join(values)}, or build them "
                "again with `craft cache build`"
            )


class CachedAnchors:
    """What the teacher said, read from the cache."""

    def __init__(self, context: Context, loader: AnchorLoader) -> None:
        self._context = context
        self._adapter = adapter_for(context.teacher.config)
        self.loader = loader
        self.directory: Path | None = loader.store.directory
        self.retained = retained_of(loader.manifest, self._adapter, unwrapped(context.policy))
        self.tasks: Sequence[str] = loader.manifest.instructions
        self.num_anchors = len(loader.store)
        self.source: str = loader.manifest.anchor_source
        self.stored_bytes = sum(shard.bytes for shard in loader.manifest.shards)
        columns = loader.store.take(torch.arange(self.num_anchors), ["instruction", "cross"])
        self.images = known_images(context)
        self.instructions: Tensor = columns["instruction"].long()  # type: ignore[union-attr]  # rows of one shape
        self.cross: Tensor = columns["cross"].bool()  # type: ignore[union-attr]

    @property
    def manifest(self) -> Manifest:
        """What the cache says about itself."""
        return self.loader.manifest

    def batch(self, step: int, batch_size: int, rank: int, world_size: int) -> AnchorBatch:
        """The anchors of a step."""
        return self.loader.batch(step, batch_size, self._context.seed, rank, world_size, most_visits(self._adapter))

    def hold_out(self, indices: Tensor) -> None:
        """Leave these anchors out of all steps."""
        self.loader.hold_out(indices)

    def take(self, indices: Tensor) -> AnchorBatch:
        """Chosen anchors."""
        return self.loader.take(indices)

    def actions(self, indices: Tensor) -> AnchorBatch | None:
        """The same with the teacher's actions: from the cache or, before the first step, from the student itself."""
        anchors = self.loader.take(indices)
        if self.retained.mode == Action.mode:
            return anchors
        if self._context.resumed:
            return None
        columns = self._ask(anchors, indices)
        return None if columns is None else dataclasses.replace(anchors, columns=columns)

    def _ask(self, anchors: AnchorBatch, indices: Tensor) -> Columns | None:
        adapter, teacher = self._adapter, self._context.teacher
        policy = unwrapped(self._context.policy)
        batch = policy_inputs(anchors.raw, teacher.preprocessor)
        with adapter_off(self._context.policy):
            if adapter.reads_instruction:  # it can be asked where nobody demonstrated, as for cross anchors
                rngs = visit_generators(self._context.seed, None, indices.tolist())
                actions = Action(top_k=self._context.config.top_k)
                return ask(adapter, policy, teacher.config, batch, actions, rngs)
            if adapter.fixed_names:  # noise around demonstrated actions, which a cache does not keep
                return None
            with torch.no_grad(), mode(policy, train=adapter.train_mode), autocast(teacher.config):
                return {"target": adapter.output(policy, batch, {}).values.float().cpu().unsqueeze(1)}

    def units(self, loss_type: str) -> list[float]:
        """Per task, the drift that counts as 1."""
        return units_of(self.manifest.scales, self.tasks, loss_type)

    def layer_scales(self, loss_type: str) -> dict[str, float] | None:
        """The spread of each layer of hidden states."""
        return layer_scales_of(self.manifest.values.get("layer_scales"), loss_type)

    def costs(self) -> list[Cost]:
        """The mapped files, which the system may drop and read again, and images that stay decoded."""
        pixels = sum(math.prod(f.shape) for f in self.manifest.input_features.values() if f.codec == "png")
        decoded = self.num_anchors * pixels
        return [
            Cost("anchor cache, mapped from disk", self.stored_bytes),
            Cost("anchors' decoded images", decoded if decoded <= DECODED_BYTES else 0),
            *_embedded(self.images),
        ]

    def identity(self) -> dict[str, Any]:
        """The manifest, which names the checksum of every shard."""
        return {"teacher": "cache", "manifest": sha256_of(self.loader.store.directory / MANIFEST_FILE)}


KEPT_BYTES = 2**30


def known_images(context: Context) -> KnownImages:
    """The anchors' embedded images, if nothing that embeds them is trained."""
    adapter = adapter_for(context.teacher.config)
    # A sharded module is gathered at each call, so all ranks must call it equally often.
    embedder = None if context.config.shard else adapter.image_embedder(unwrapped(context.policy))
    return KnownImages(embedder)


def _embedded(images: KnownImages) -> list[Cost]:
    return [Cost("anchors' embedded images", images.nbytes)] if images.nbytes else []


class FramesInMemory:
    """The plan's anchors as raw batches, demonstrated actions included; read when first asked for, kept while they fit.

    Args:
        job: The plan, its datasets, and the teacher whose statistics states are drawn from.
        made: States that the plan refers to and the frames do not hold.
        kept_bytes: How much is kept.
    """

    def __init__(self, job: Job, made: MadeStates = NOTHING_MADE, kept_bytes: int = KEPT_BYTES) -> None:
        _check_alike(job)
        self._made = made
        self._job = job
        self._state_stats = normalizer_stats(job.teacher.preprocessor).get(STATE)
        self._limit = kept_bytes
        self._kept: dict[int, RawBatch] = {}
        self._kept_bytes = 0
        self._row_bytes = 0  # of the largest frame so far

    def read(self, rows: npt.NDArray[np.int64]) -> RawBatch:
        """Anchors by their rows in the plan, such as make one batch."""
        missing = np.asarray([row for row in np.unique(rows) if int(row) not in self._kept], dtype=np.int64)
        fresh = self._read(missing) if len(missing) else {}
        return _joined([fresh[int(row)] if int(row) in fresh else self._kept[int(row)] for row in rows])

    def bytes_at_most(self, num_anchors: int) -> int:
        """Memory once all anchors have been visited, judged by the frames read so far."""
        return min(self._limit, num_anchors * self._row_bytes)

    def _read(self, rows: npt.NDArray[np.int64]) -> dict[int, RawBatch]:
        plan = self._job.plan
        datasets = [opened.dataset for opened in self._job.datasets]
        (frames,) = read_batches(datasets, [(int(plan.dataset[rows[0]]), plan.frame[rows])])
        batch = as_anchors(frames, plan, rows, self._state_stats, self._made)
        fresh = {int(row): {name: values[place] for name, values in batch.items()} for place, row in enumerate(rows)}
        size = max(_nbytes(frame) for frame in fresh.values())
        self._row_bytes = max(self._row_bytes, size)
        if self._kept_bytes + size * len(fresh) <= self._limit:
            self._kept |= fresh
            self._kept_bytes += size * len(fresh)
        return fresh


def _joined(frames: Sequence[RawBatch]) -> RawBatch:
    """Frames with the same keys -> a batch, as a data loader collates it."""
    return {
        name: torch.stack([frame[name] for frame in frames])
        if isinstance(value, Tensor)
        else [frame[name] for frame in frames]
        for name, value in frames[0].items()
    }


def _nbytes(frame: RawBatch) -> int:
    return sum(value.nbytes for value in frame.values() if isinstance(value, Tensor))


def _check_alike(job: Job) -> None:
    """A batch holds anchors of several datasets, so their observations must have the same names and sizes."""

    def observations(dataset: Any) -> dict[str, tuple[int, ...]]:
        features = dataset.meta.features
        wanted = job.teacher.config.input_features
        return {name: tuple(features[name]["shape"]) for name in sorted(wanted) if name in features}

    first, *others = [(opened.repo_id, observations(opened.dataset)) for opened in job.datasets]
    for repo_id, found in others:
        if found != first[1]:
            raise CraftError(
                f"{first[0]} has the observations {first[1]} and {repo_id} {found}: one batch of anchors cannot hold "
                "both. Use datasets with the same cameras and image sizes"
            )


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
        self.images = known_images(context)
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
        self._origins = without_anchors(self._origins, indices)

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
            return [frames, *_embedded(self.images)]
        tensors = [*self._copy.parameters(), *self._copy.buffers()]
        return [
            Cost("frozen copy of the teacher", sum(tensor.nbytes for tensor in tensors)),
            frames,
            *_embedded(self.images),
        ]

    def identity(self) -> dict[str, Any]:
        """The recipe: teacher, frames, instructions and values."""
        recipe = {name: value for name, value in self._job.recipe().items() if name not in _OF_A_BUILD}
        return {"teacher": "online", "recipe": digest(recipe)}

    def _ask(self, indices: Tensor, rngs: Sequence[np.random.Generator], retained: Retained) -> AnchorBatch:
        plan, rows = self._job.plan, indices.numpy()
        parts: list[tuple[npt.NDArray[np.int64], RawBatch, Columns]] = []
        for places in plan.alike(rows):  # these have the same keys, others may not
            raw = self._frames.read(rows[places])
            chosen = [rngs[place] for place in places]
            parts.append((places, raw, self._columns(rows[places].tolist(), raw, chosen, retained)))
        order = torch.from_numpy(np.concatenate([places for places, _, _ in parts])).argsort()
        raw = {
            name: torch.cat([raw[name] for _, raw, _ in parts]).index_select(0, order)
            for name in self._job.teacher.config.input_features
            if all(name in raw for _, raw, _ in parts)
        }
        raw["task"] = [plan.instructions[index] for index in plan.instruction[rows]]
        columns = take(concatenate(columns for _, _, columns in parts), order)
        return AnchorBatch(raw, columns, self.instructions[indices], rows=indices.tolist())

    def _make_states(self) -> MadeStates:
        if self._copy is not None:
            return self._job.make_states(self._copy)
        with adapter_off(self._student):
            return self._job.make_states(unwrapped(self._student))

    def _columns(
        self, rows: Sequence[int], raw: RawBatch, rngs: Sequence[np.random.Generator], retained: Retained
    ) -> Columns:
        teacher, adapter = self._job.teacher, self._job.adapter
        batch = policy_inputs(raw, teacher.preprocessor)
        policy = unwrapped(self._student) if self._copy is None else self._copy
        with (
            adapter_off(self._student) if self._copy is None else nullcontext(),
            looked_up(self.images, rows, retained, adapter, policy),
        ):
            return ask(adapter, policy, teacher.config, batch, retained, rngs)

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


def anchor_bytes(online: bool, manifest: Manifest | None, asked: int, pixels: int, numbers: int) -> dict[str, int]:
    """Bytes of the machine's own memory at most, by what they are; per frame `pixels` and `numbers`."""
    count = manifest.num_anchors if manifest else asked
    if online:
        return {"anchors' frames": min(KEPT_BYTES, count * (pixels + numbers))}
    decoded = count * pixels
    found = {"anchors' decoded images": decoded if decoded <= DECODED_BYTES else 0}
    if manifest is not None:
        found["anchor cache, mapped from disk"] = sum(shard.bytes for shard in manifest.shards)
    return found
