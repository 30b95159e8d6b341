"""From the user's configuration to a job: open the datasets, choose the anchors, refuse what cannot work."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.anchors.build import Job, OpenDataset
from lerobot_craft.anchors.plan import Plan, make_plan, parse_old_instructions
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags, draws_from_old, num_anchors
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import (
    dataset_fingerprint,
    frame_table,
    instructions,
    open_dataset,
    open_metadata,
)
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.policies import PolicyAdapter, adapter_for
from lerobot_craft.teacher.load import Teacher

logger = logging.getLogger(__name__)


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
            "use --anchor_source=dataset with a dataset of the old tasks"
        )
    # Cross anchors need the old tasks' instructions, not their frames.
    old = [] if config.anchor_source == "cross" else _open(config.dataset, "dataset", teacher)
    if opened is not None and config.anchor_source != "cross":
        old = [opened, *old]
    new = _open(config.new_dataset, "new_dataset", teacher) if config.anchor_source != "dataset" else []
    if config.anchor_source != "dataset" and not new:
        raise CraftError(
            f"--anchor_source={config.anchor_source} pairs frames of the new task with old instructions: give the "
            "dataset that you will fine-tune on as --new_dataset.repo_id (and --new_dataset.root)"
        )
    for data in (*old, *new):
        _check_features(adapter, teacher, data)
    learned = [_learned(data, new_episodes) for data in new]
    plan = make_plan(
        config.anchor_source,  # type: ignore[arg-type]  # checked there
        num_anchors(config.num_samples, config.old_frames, adapter),
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


def old_instructions(config: BuildConfig) -> list[str]:
    """The instructions to keep: given by the user, or read from the old datasets' metadata."""
    if config.old_instructions is not None:
        return parse_old_instructions(config.old_instructions)
    metadata = [open_metadata(*address, config.dataset.revision) for address in config.dataset.addresses("dataset")]
    return list(dict.fromkeys(instruction for meta in metadata for instruction in instructions(meta)))


def _instructions_to_keep(config: BuildConfig) -> list[str] | None:
    """Like `old_instructions`, or None to keep whatever has frames."""
    if config.old_instructions is None and config.anchor_source != "cross":
        return None
    return old_instructions(config) or None


def _open(flags: DatasetFlags, flag: str, teacher: Teacher) -> list[OpenDataset]:
    opened = []
    for repo_id, root in flags.addresses(flag):
        dataset = open_dataset(repo_id, root, flags.revision, policy_config=teacher.config)
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
