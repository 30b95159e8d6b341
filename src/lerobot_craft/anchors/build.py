"""Building a cache: read frames, ask the teacher, write shards, and finally a manifest that marks it complete.

The plan alone decides how anchors are split. So resuming a build only adds missing shards, on any number of ranks.

`prepare` gets from the user's configuration to a job: it opens the datasets, chooses the anchors and refuses what
cannot work.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Columns, Ragged, concatenate, describe, take
from lerobot_craft.anchors.images import encode_images
from lerobot_craft.anchors.manifest import (
    BUILD_FILE,
    MANIFEST_FILE,
    DatasetRecord,
    InputFeature,
    Manifest,
    ShardReader,
    ShardRecord,
    finished_shards,
    shard_name,
    write_shard,
)
from lerobot_craft.anchors.observations import NOTHING_MADE, STATE, MadeStates, as_anchors
from lerobot_craft.anchors.plan import Plan, make_plan, parse_old_instructions
from lerobot_craft.anchors.recipe import (
    OLD_DATASET,
    AnchorConfig,
    BuildConfig,
    DatasetFlags,
    differences,
    digest,
    draws_from_old,
    num_anchors,
)
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.anchors.teacher import Teacher, normalizer_stats
from lerobot_craft.anchors.values import generators, measure_scales, teacher_columns
from lerobot_craft.anchors.walks import make_states
from lerobot_craft.core.ranks import main_decides
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.io.files import plain_errors, read_bytes, temporary_path, write_atomically
from lerobot_craft.lerobot_api.datasets import (
    RawBatch,
    dataset_fingerprint,
    frame_table,
    instructions,
    open_dataset,
    open_metadata,
)
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.lerobot_api.pretrained import autocast, autocast_dtype
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.lerobot_api.train_parts import RANKS_WAIT, several_processes
from lerobot_craft.policies import PolicyAdapter, adapter_for, mode


@dataclass(frozen=True)
class Ranks:
    """This process and the number of processes."""

    rank: int = 0
    world_size: int = 1

    @classmethod
    def joined(cls, *, cpu: bool) -> "Ranks":
        """Join the other processes, if there are any."""
        if not several_processes():
            return cls()
        from accelerate import PartialState

        state = PartialState(cpu=cpu, timeout=RANKS_WAIT)
        return cls(state.process_index, state.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes the shared files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()


logger = logging.getLogger(__name__)

INPUT = "input."
Progress = Callable[[int], object]


@dataclass(frozen=True)
class OpenDataset:
    """A dataset with its manifest entry."""

    dataset: Any  # LeRobotDataset
    repo_id: str
    root: str | None
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class Job:
    """Everything that determines a cache's content."""

    teacher: Teacher
    adapter: PolicyAdapter
    retained: Retained
    plan: Plan
    datasets: Sequence[OpenDataset]
    inputs: str
    batch_size: int
    shard_size: int

    @property
    def num_shards(self) -> int:
        """Number of shard files."""
        return -(-len(self.plan) // self.shard_size)

    @property
    def autocast(self) -> str | None:
        """Dtype in which the teacher computes, if it differs from its weights'."""
        return autocast_dtype(self.teacher.config)

    def make_states(self, policy: Any) -> MadeStates:
        """States that the plan needs before the teacher can be asked; `policy` is the teacher's network."""
        datasets = [opened.dataset for opened in self.datasets]
        return make_states(self.plan, self.teacher, policy, datasets, self.batch_size)

    def recipe(self) -> dict[str, Any]:
        """What must match for a build to be resumed."""
        return {
            "schema": Manifest.SCHEMA,
            "teacher": self.teacher.fingerprint,
            "retention_mode": self.retained.mode,
            "values": self.retained.values(),
            "autocast": self.autocast,
            "plan": self.plan.digest(),
            "datasets": [dataset.fingerprint for dataset in self.datasets],
            "inputs": self.inputs,
            "batch_size": self.batch_size,
            "shard_size": self.shard_size,
        }


def build_cache(
    job: Job, directory: Path, *, ranks: Ranks, num_workers: int = 0, progress: Progress | None = None
) -> None:
    """Build a job's cache, or resume its build.

    Args:
        job: What to build.
        directory: Output directory.
        ranks: The processes that share the work.
        num_workers: Processes that read frames.
        progress: Called with the number of this rank's newly finished anchors, including those of an interrupted build.
    """
    recipe = job.recipe()
    if ranks.is_main:
        _start(directory, recipe)
    ranks.wait()
    if main_decides((directory / MANIFEST_FILE).exists):
        return
    finished = finished_shards(directory)
    mine = _shards_of(job, ranks)
    _report(progress, sum(finished[shard].rows for shard in mine if shard in finished))
    _build_shards(job, directory, [shard for shard in mine if shard not in finished], num_workers, progress)
    ranks.wait()
    if ranks.is_main:
        _finish(job, directory, digest(recipe))
    ranks.wait()


def share(job: Job, ranks: Ranks) -> int:
    """Number of this rank's anchors."""
    return sum(len(_rows_of(job, shard)) for shard in _shards_of(job, ranks))


def is_finished(job: Job, directory: Path) -> bool:
    """Whether the directory already holds this cache. Another cache is refused. A collective."""
    if not main_decides((directory / MANIFEST_FILE).exists):
        return False
    manifest = Manifest.load(directory)
    if manifest.values.get("recipe") == digest(job.recipe()):
        with suppress(CraftError):  # leftovers of a killed run; harmless if they cannot be removed
            manifest.clear_build(directory)
        return True
    raise CraftError(
        f"{directory} holds a finished cache that was built with other settings: give another "
        f"{setting('output_dir')}, or remove "
        "that one"
    )


def _start(directory: Path, recipe: dict[str, Any]) -> None:
    with plain_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    path = directory / BUILD_FILE
    if not path.exists():
        # A build killed during its first write leaves only the temporary file.
        if any(entry.name != temporary_path(path).name for entry in directory.iterdir()):
            raise CraftError(
                f"{directory} is not empty and holds no unfinished build: give another {setting('output_dir')}"
            )
        write_atomically(path, json.dumps(recipe, indent=2, sort_keys=True).encode())
        return
    try:
        recorded = json.loads(read_bytes(path))
    except ValueError as error:
        raise CraftError(f"{path} is damaged ({error}): remove {directory} and build again") from error
    if changed := differences(recorded, recipe):
        raise CraftError(
            f"{directory} holds an unfinished build with other settings ({', '.join(changed)} differ): run it with the "
            f"settings it was started with, give another {setting('output_dir')}, or remove it"
        )


def _build_shards(
    job: Job, directory: Path, shards: Sequence[int], num_workers: int, progress: Progress | None
) -> None:
    batches = [(shard, dataset, rows) for shard in shards for dataset, rows in _batches(job, shard)]
    wanted = [(dataset, job.plan.frame[rows]) for _, dataset, rows in batches]
    frames = read_batches([opened.dataset for opened in job.datasets], wanted, num_workers)
    made = job.make_states(job.teacher.policy) if shards else NOTHING_MADE
    done: list[tuple[npt.NDArray[np.int64], Columns]] = []
    # Compress and write a shard while the next one is computed; one at a time limits memory.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="write_shard") as writer,
        mode(job.teacher.policy, train=job.adapter.train_mode),
    ):
        pending: Future[ShardRecord] | None = None
        for (shard, dataset, rows), raw in zip(batches, frames, strict=True):
            done.append((rows, _anchor_columns(job, dataset, rows, raw, made)))
            _report(progress, len(rows))
            if sum(len(rows) for rows, _ in done) == len(_rows_of(job, shard)):
                if pending is not None:
                    pending.result()
                pending = writer.submit(_write, directory, shard, done)
                done = []
        if pending is not None:
            pending.result()


def _shards_of(job: Job, ranks: Ranks) -> list[int]:
    return list(range(ranks.rank, job.num_shards, ranks.world_size))


def _rows_of(job: Job, shard: int) -> npt.NDArray[np.int64]:
    start = shard * job.shard_size
    return np.arange(start, min(start + job.shard_size, len(job.plan)))


def _batches(job: Job, shard: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """(dataset, rows of the plan) of each batch in a shard; a batch is read from one dataset."""
    rows = _rows_of(job, shard)
    for places in job.plan.alike(rows):
        dataset = int(job.plan.dataset[rows[places[0]]])
        for start in range(0, len(places), job.batch_size):
            yield dataset, rows[places[start : start + job.batch_size]]


def _anchor_columns(job: Job, dataset: int, rows: npt.NDArray[np.int64], raw: RawBatch, made: MadeStates) -> Columns:
    teacher, plan = job.teacher, job.plan
    raw = as_anchors(raw, plan, rows, normalizer_stats(teacher.preprocessor).get(STATE), made)
    batch = policy_batch(raw, job.datasets[dataset].dataset.meta.camera_keys, teacher.preprocessor)
    with torch.no_grad(), autocast(teacher.config):
        columns = teacher_columns(
            job.adapter, teacher.policy, batch, job.retained, generators(plan.seed, rows.tolist())
        )
    _require_numbers(columns, job, dataset, plan.frame[rows])
    columns |= {
        "instruction": torch.from_numpy(plan.instruction[rows]).to(torch.int32),
        "cross": torch.from_numpy(plan.cross[rows]),
        "dataset": torch.from_numpy(plan.dataset[rows]).to(torch.int32),
        "frame": torch.from_numpy(plan.frame[rows]),
    }
    for name in teacher.config.input_features:
        if name in raw and not (job.inputs == "reference" and raw[name].dtype == torch.uint8):
            columns[f"{INPUT}{name}"] = raw[name]  # images are compressed when the shard is written
    return columns


def _require_numbers(columns: Columns, job: Job, dataset: int, frames: npt.NDArray[np.int64]) -> None:
    """Refuse NaN and infinity. Minus infinity is allowed: it is the logarithm of an empty tail."""
    for name, column in columns.items():
        values = column.values if isinstance(column, Ragged) else column
        if values.is_floating_point() and bool((values.isnan() | (values == torch.inf)).any()):
            raise CraftError(
                f"the teacher answers NaN or infinity ({name}) to some of the frames "
                f"{', '.join(map(str, frames.tolist()))} of {job.datasets[dataset].repo_id}: look at their states and "
                "images; if they are sound, compute in float32 (--policy.dtype=float32)"
            )


def _write(directory: Path, shard: int, done: Sequence[tuple[npt.NDArray[np.int64], Columns]]) -> ShardRecord:
    rows = torch.from_numpy(np.concatenate([rows for rows, _ in done]))
    columns = take(concatenate(columns for _, columns in done), rows.argsort())
    for name, column in columns.items():
        if name.startswith(INPUT) and isinstance(column, Tensor) and column.dtype == torch.uint8:
            columns[name] = encode_images(column)
    return write_shard(directory, shard, columns)


def _finish(job: Job, directory: Path, recipe_digest: str) -> None:
    records = finished_shards(directory)
    missing = [shard_name(shard) for shard in range(job.num_shards) if shard not in records]
    if missing:
        raise CraftError(
            f"{directory}: {len(missing)} shards were not written, {missing[0]} first: run the same command again"
        )
    readers = [ShardReader(directory / records[shard].file) for shard in range(job.num_shards)]
    plan, retained = job.plan, job.retained
    scales, layer_scales = measure_scales(readers, len(plan.instructions), retained)
    values = retained.values() | {"recipe": recipe_digest}
    manifest = Manifest(
        kind=retained.mode,
        policy_type=job.adapter.policy_type,
        teacher=job.teacher.fingerprint,
        values=values | ({"layer_scales": layer_scales} if layer_scales else {}),
        dtype=_dtype_of(job.teacher.policy),
        autocast=job.autocast,
        anchor_source=plan.source,
        inputs="reference" if job.inputs == "reference" else "embedded",
        input_features=_input_features(job, readers[0].columns),
        datasets=[_record(job, index) for index in range(len(job.datasets))],
        instructions=list(plan.instructions),
        counts=plan.counts(),
        scales=scales,
        seed=plan.seed,
        num_anchors=len(plan),
        columns={name: describe(column) for name, column in sorted(readers[0].columns.items())},
        shards=[records[shard] for shard in range(job.num_shards)],
    )
    manifest.save(directory)


def _input_features(job: Job, columns: Columns) -> dict[str, InputFeature]:
    features = {}
    for name, feature in job.teacher.config.input_features.items():
        column = columns.get(f"{INPUT}{name}")
        if isinstance(column, Tensor):
            features[name] = InputFeature("raw", list(column.shape[1:]))
        elif column is not None or (job.inputs == "reference" and feature.type.value == "VISUAL"):
            sample = job.datasets[int(job.plan.dataset[0])].dataset[int(job.plan.frame[0])]
            features[name] = InputFeature("png", list(sample[name].shape))
    return features


def _record(job: Job, index: int) -> DatasetRecord:
    opened = job.datasets[index]
    frames = np.unique(job.plan.frame[job.plan.dataset == index]).tolist()
    return DatasetRecord(opened.repo_id, opened.revision, opened.root, opened.fingerprint, len(opened.dataset), frames)


def _dtype_of(policy: torch.nn.Module) -> str:
    """The dtype of most weights."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in policy.parameters():
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    return str(max(sizes, key=lambda dtype: sizes[dtype])).removeprefix("torch.")


def _report(progress: Progress | None, count: int) -> None:
    if progress is not None and count:
        progress(count)


@dataclass(frozen=True)
class OldFrames:
    """Old frames from a memory, in addition to the datasets that the flags name.

    Attributes:
        opened: The frames; all become anchors before datasets give any. None: only the instructions are known.
        instructions: What to keep. May include tasks without frames here, and omit some that have them.
    """

    opened: OpenDataset | None
    instructions: Sequence[str]


def prepare(
    config: BuildConfig,
    teacher: Teacher,
    memory: OldFrames | None = None,
    *,
    new_episodes: Sequence[int] | None = None,
) -> Job:
    """The job that a configuration describes for a teacher.

    Args:
        config: What to build.
        teacher: Who is asked.
        memory: Old frames beside those of the old datasets.
        new_episodes: The episodes of the new dataset that are learned; None: all. The others show other tasks.
    """
    adapter = adapter_for(teacher.config)
    opened = None if memory is None else memory.opened
    config = replace(config, anchor_source=config.source(adapter.reads_instruction, opened is not None))
    retained = config.retained(adapter, teacher.policy)
    if config.anchor_source != "dataset" and not adapter.reads_instruction:
        raise CraftError(
            f"{adapter.policy_type} reads no instruction, so new frames cannot be paired with old ones: "
            f"use {setting('anchor_source')}=dataset with a dataset of the old tasks"
        )
    # Cross anchors need the old tasks' instructions, not their frames.
    old = [] if config.anchor_source == "cross" else _open(config.old_dataset, OLD_DATASET, teacher)
    if opened is not None and config.anchor_source != "cross":
        old = [opened, *old]
    new = _open(config.new_dataset, "new_dataset", teacher) if config.anchor_source != "dataset" else []
    if config.anchor_source != "dataset" and not new:
        raise CraftError(
            f"{setting('anchor_source')}={config.anchor_source} pairs frames of the new task with old instructions: "
            f"give the dataset that you will fine-tune on as {setting('new_dataset.repo_id')} (and "
            f"{setting('new_dataset.root')})"
        )
    for data in (*old, *new):
        _check_features(adapter, teacher, data)
    learned = [_learned(data, new_episodes) for data in new]
    plan = make_plan(
        config.anchor_source,  # type: ignore[arg-type]  # checked there
        num_anchors(config.num_anchors, config.old_frames, adapter),
        config.seed,
        [_source(data) for data in old],
        [(table.take(rows), names) for rows, (table, names) in zip(learned, map(_source, new), strict=True)],
        _instructions_to_keep(config) if memory is None else memory.instructions,
        config.drawn_states,
        config.state_jitter,
        config.old_frames,
        config.walked_states,
        _walk_length(teacher, new) if config.walked_states and new else 1,
        draws_from_old(config.draw_from, config.anchor_source, adapter),
        first=0 if opened is None else 1,
    )
    for number, rows in enumerate(learned, start=len(old)):
        plan.frame[plan.dataset == number] = rows[plan.frame[plan.dataset == number]]
    if len(plan) < plan.requested:
        logger.warning("%s", _fewer(plan))
    return Job(teacher, adapter, retained, plan, [*old, *new], config.inputs, config.batch_size, config.shard_size)


def _fewer(plan: Plan) -> str:
    """A message on how many anchors there are instead of those asked for, and why."""
    origin = plan.dataset * (1 + int(plan.frame.max())) + plan.frame  # one number per frame
    made, old = int(plan.cross.sum()), int((~plan.cross).sum())
    parts = [f"{old} old frames"] if old else []
    if made:
        frames = len(np.unique(origin[plan.cross]))
        parts.append(f"{made} made from {frames} frames, by {len(plan.instructions)} old instructions")
    return f"{len(plan)} anchors instead of {plan.requested}: {' and '.join(parts)}. The datasets have no more frames."


def _walk_length(teacher: Teacher, new: Sequence[OpenDataset]) -> int:
    """Chunks per walk: as many as a median episode of the new data has, at least two."""
    lengths = [length for opened in new for length in opened.dataset.meta.episodes["length"]]
    return max(2, int(np.median(lengths)) // teacher.config.n_action_steps)


def old_instructions(config: AnchorConfig) -> list[str]:
    """The instructions to keep: given by the user, or read from the old datasets' metadata."""
    if config.old_instructions is not None:
        return parse_old_instructions(config.old_instructions)
    old = config.old_dataset
    metadata = [open_metadata(*each, old.revision, named=OLD_DATASET) for each in old.addresses(OLD_DATASET)]
    return list(dict.fromkeys(instruction for meta in metadata for instruction in instructions(meta)))


def _instructions_to_keep(config: AnchorConfig) -> list[str] | None:
    """Like `old_instructions`, or None to keep whatever has frames."""
    if config.old_instructions is None and config.anchor_source != "cross":
        return None
    return old_instructions(config) or None


def _open(flags: DatasetFlags, name: str, teacher: Teacher) -> list[OpenDataset]:
    opened = []
    for repo_id, root in flags.addresses(name):
        dataset = open_dataset(repo_id, root, flags.revision, policy_config=teacher.config, named=name)
        opened.append(OpenDataset(dataset, repo_id, root, flags.revision, dataset_fingerprint(dataset)))
    return opened


def _source(opened: OpenDataset) -> tuple[Any, Sequence[str]]:
    return frame_table(opened.dataset), instructions(opened.dataset.meta)


def _learned(opened: OpenDataset, episodes: Sequence[int] | None) -> npt.NDArray[np.int64]:
    """Rows of a new dataset that belong to these episodes."""
    episode = frame_table(opened.dataset).episode
    return np.arange(len(episode)) if episodes is None else np.flatnonzero(np.isin(episode, episodes))


def _check_features(adapter: PolicyAdapter, teacher: Teacher, opened: OpenDataset) -> None:
    """Check that the dataset has every observation the policy reads; some cameras may be missing if it masks them."""
    masked = require_features(
        teacher.config,
        opened.dataset.meta.features,
        dataset=opened.repo_id,
        masks_missing_cameras=adapter.masks_missing_cameras(teacher.policy),
    )
    if masked:
        logger.warning("%s has no %s: the policy masks these cameras", opened.repo_id, ", ".join(masked))
