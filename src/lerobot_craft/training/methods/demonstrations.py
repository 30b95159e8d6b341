"""Demonstrations of the old tasks (or the new one), for methods that compute lerobot's own loss on them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lerobot_craft.anchors.plan import Plan, make_plan
from lerobot_craft.anchors.recipe import OLD_DATASET, DatasetFlags
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import (
    RawBatch,
    dataset_fingerprint,
    frame_table,
    instructions,
    open_dataset,
    open_metadata,
)
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.lerobot_api.preload import preloaded
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import mode
from lerobot_craft.training.methods.method import Context

Address = tuple[str, str | None]


@dataclass(frozen=True)
class Demonstrations:
    """Chosen frames with their actions, evenly over tasks and episodes, as `lerobot-train` would see them.

    Without image transforms, and without the last frames of an episode where the policy leaves them out.
    """

    datasets: Sequence[Any]  # LeRobotDataset
    plan: Plan
    rows: npt.NDArray[np.int64]  # of the datasets' frame tables, one per row of the plan

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def cameras(self) -> list[str]:
        """Image features of the datasets."""
        return sorted({key for dataset in self.datasets for key in dataset.meta.camera_keys})

    def batches(self, size: int, first: int = 0, stride: int = 1) -> Iterator[RawBatch]:
        """All frames, dataset by dataset, in batches of at most `size`; every `stride`-th batch from the `first` on."""
        wanted = []
        for dataset in range(len(self.datasets)):
            rows = self.rows[self.plan.dataset == dataset]
            wanted += [(dataset, rows[start : start + size]) for start in range(0, len(rows), size)]
        return read_batches(self.datasets, wanted[first::stride])

    @property
    def are_most(self) -> bool:
        """Whether they are more than half of the datasets' frames."""
        return 2 * len(self) > sum(map(len, self.datasets))

    def in_memory(self) -> "Demonstrations":
        """The same, of datasets that are read whole, column by column: sooner than frame by frame where they are most.

        Raises:
            CraftError: The datasets need more than half of the memory that is available, or cannot be kept.
        """
        smaller = "replay fewer frames (--craft.replay_frames)"
        return replace(self, datasets=[preloaded(dataset, smaller=smaller)[0] for dataset in self.datasets])

    def digest(self) -> str:
        """SHA-256 that changes with the choice of frames and with the datasets."""
        parts = [self.plan.digest(), *(dataset_fingerprint(dataset) for dataset in self.datasets)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def old_demonstrations(context: Context, count: int, flag: str | None = None) -> Demonstrations:
    """`count` frames of `--craft.old_dataset`, and at least one of each task, unless `flag` is who asks for `count`.

    Raises:
        CraftError: There is no old dataset, it cannot be read, it lacks what the policy reads, or `flag` asks for less
            frames than tasks.
    """
    flags = context.config.old_dataset
    addresses = flags.addresses(OLD_DATASET)
    if not addresses:
        raise CraftError(
            f"--craft.method={context.config.method} needs demonstrations of the old tasks: give their datasets as "
            "--craft.old_dataset.repo_id (and --craft.old_dataset.root)"
        )
    datasets = [_open_old(flags, address, context) for address in addresses]
    new = new_metadata(context).features
    for dataset in datasets:
        _check_features(context, dataset.meta, new)
    return _choose(context, datasets, count, flag)


def new_demonstrations(context: Context, count: int) -> Demonstrations:
    """`count` frames of the dataset that is trained on, and at least one of each of its tasks."""
    data = context.train.dataset
    dataset = open_dataset(
        data.repo_id, data.root, data.revision, policy_config=context.teacher.config, episodes=data.episodes
    )
    return _choose(context, [dataset], count, None)


def new_metadata(context: Context) -> Any:
    """What the dataset that is trained on says about itself."""
    data = context.train.dataset
    return open_metadata(data.repo_id, data.root, data.revision)


def policy_features(context: Context) -> list[str]:
    """Features that the policy reads or is trained on, by the names they have in datasets (before `rename_map`)."""
    config: Any = context.teacher.config
    in_datasets = {renamed: name for name, renamed in (context.train.rename_map or {}).items()}
    return [in_datasets.get(name, name) for name in (*config.input_features, *config.output_features)]


def demonstration_loss(context: Context, raw: RawBatch, cameras: Sequence[str], seed: int) -> Tensor:
    """The loss that lerobot trains by, on a raw batch, in eval mode as lerobot measures it on held-out data.

    What is random in it is drawn from `seed`; the caller's random state stays as it was.
    """
    device = context.accelerator.device
    devices = [device] if device.type == "cuda" else []
    batch = policy_batch(raw, cameras, context.teacher.preprocessor)
    with torch.random.fork_rng(devices), mode(context.policy, train=False), context.accelerator.autocast():
        torch.manual_seed(seed)
        loss: Tensor = context.policy.forward(batch)[0]
    return loss


def _open_old(flags: DatasetFlags, address: Address, context: Context) -> Any:
    return open_dataset(*address, flags.revision, policy_config=context.teacher.config, named=OLD_DATASET)


def _check_features(context: Context, old: Any, new: Mapping[str, Any]) -> None:
    lacking = [name for name in policy_features(context) if name in new and name not in old.features]
    if lacking:
        raise CraftError(
            f"the old dataset {old.repo_id} has no {', '.join(lacking)}, which the policy reads and the new dataset "
            "has: use one with the same names, or rename its features with lerobot-edit-dataset"
        )
    require_features(
        context.teacher.config,
        old.features,
        dataset=old.repo_id,
        masks_missing_cameras=True,  # or the new dataset would have been refused
        rename_map=context.train.rename_map,
        actions=True,
    )


def _choose(context: Context, datasets: Sequence[Any], count: int, flag: str | None) -> Demonstrations:
    drop_last = getattr(context.teacher.config, "drop_n_last_frames", 0)
    tables = [frame_table(dataset) for dataset in datasets]
    kept = [np.flatnonzero(table.position < table.length - drop_last) for table in tables]
    sources = [
        (table.take(rows), instructions(dataset.meta))
        for table, rows, dataset in zip(tables, kept, datasets, strict=True)
    ]
    tasks = {names[task] for table, names in sources for task in np.unique(table.task)}
    if flag is not None and count < len(tasks):
        raise CraftError(f"--{flag}={count} is less than one frame for each of the {len(tasks)} tasks: give more")
    plan = make_plan("dataset", max(count, len(tasks)), context.seed, sources)
    rows = np.array([kept[d][f] for d, f in zip(plan.dataset, plan.frame, strict=True)], dtype=np.int64)
    return Demonstrations(datasets, plan, rows)
