"""Experience replay: keep frames of the old tasks and train on them beside the new ones."""

import logging
import math
from typing import Any, ClassVar, override

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lerobot_craft.anchors.loader import batch_indices
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import RawBatch
from lerobot_craft.lerobot_api.features import frame_bytes
from lerobot_craft.lerobot_api.train_steps import bar_is_welcome
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.demonstrations import (
    Demonstrations,
    new_metadata,
    old_demonstrations,
    policy_features,
)
from lerobot_craft.training.methods.method import Context, Cost, Knob, Method, MethodParts

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 32
_BAR_AFTER_S = 2.0
_TASK, _IS_PAD = "task", "_is_pad"


class Replay(Method):
    """Every batch of B new frames gets round(ratio * B) old ones; the loss is lerobot's own on all of them.

    The `--craft.replay_frames` old frames are chosen once, evenly over tasks and episodes, and held decoded in memory,
    on every rank. Which of them join a step depends on seed, step and rank only, so a resumed run goes on in the same
    order, and each frame comes once per pass over the buffer.
    """

    name: ClassVar[str] = "er"
    label: ClassVar[str] = "replay"
    knob: ClassVar[Knob | None] = Knob("replay_ratio", 1.0, (0.5, 1.0, 2.0))
    beside_a_batch: ClassVar[str] = ", or the old frames beside it"

    @classmethod
    @override
    def holds(cls, config: CraftConfig) -> str:
        return (
            f"{config.replay_frames} frames of {config.old_dataset.repo_id or 'the old datasets'} in memory; "
            f"{config.replay_ratio:g} of them join the batch for each new frame"
        )

    @classmethod
    @override
    def parts(cls, cfg: Any, config: CraftConfig, policy: nn.Module) -> MethodParts:
        new = cfg.batch_size * config.accumulate
        rows = math.ceil((new + round(config.replay_ratio * new)) / config.accumulate)
        pixels, numbers = frame_bytes(cfg.policy)
        frames = config.replay_frames * (pixels * torch.float32.itemsize + numbers)
        return MethodParts(rows, host={"old frames": frames})

    @override
    def start(self, context: Context) -> None:
        super().start(context)
        if getattr(context.train, "sample_weighting", None) is not None:
            raise CraftError(
                "--sample_weighting weighs frames by their number in the new dataset, and --craft.method=er adds "
                "frames of another one: use one of the two"
            )
        new = context.train.batch_size * context.config.accumulate
        self._per_batch = round(context.config.replay_ratio * new)
        if self._per_batch < 1:
            raise CraftError(
                f"--craft.replay_ratio={context.config.replay_ratio} adds no frame to a batch of {new}: give at least "
                f"{1 / new:g}"
            )
        frames = old_demonstrations(context, context.config.replay_frames, "craft.replay_frames")
        if len(frames) < context.config.replay_frames:
            logger.warning("the old datasets have %d frames; %d were asked for", len(frames), frames.plan.requested)
        self._digest = frames.digest()
        features = shared_features(context, frames)
        whole = context.config.preload and frames.are_most
        self._buffer = _read(frames.in_memory() if whole else frames, features, _shows_bar(context))
        self._count = len(frames)

    @override
    def extend(self, raw: RawBatch, step: int) -> RawBatch:
        accelerator = self.context.accelerator
        rank, world = accelerator.process_index, accelerator.num_processes
        drawn = batch_indices(self._count, self._per_batch, self.context.seed, step, rank, world)
        new = next(len(value) for value in raw.values())
        # The last batch of an epoch may be short: its share of old frames stays the same.
        drawn = drawn[: round(self.context.config.replay_ratio * new)]
        self._share = len(drawn) / (new + len(drawn))
        return {key: _joined(raw[key], old, drawn) for key, old in self._buffer.items() if key in raw}

    @override
    def metrics(self) -> dict[str, Any]:
        return {"replay_share": self._share}

    @override
    def compute(self) -> str:
        new = self.context.train.batch_size * self.context.config.accumulate
        return f"{self._per_batch} old frames join each batch of {new}"

    @override
    def costs(self) -> list[Cost]:
        tensors = [value for value in self._buffer.values() if isinstance(value, Tensor)]
        return [Cost(f"{self._count} old frames", sum(tensor.nbytes for tensor in tensors))]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"old_frames": self._digest}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("old_frames") != self._digest:
            raise CraftError(
                "the old frames are not those that this run was started with: resume with the same --seed, "
                "--craft.old_dataset and --craft.replay_frames, and with the datasets as they were"
            )


def shared_features(context: Context, frames: Demonstrations) -> set[str]:
    """Features that old and new frames can be joined in; refuses if the policy reads one that cannot.

    A feature that is in one of the datasets only, or of another shape, and that the policy does not read is left out.
    """
    new = new_metadata(context)
    shared = set(new.features)
    for dataset in frames.datasets:
        old = dataset.meta
        for name in policy_features(context):
            if name in old.features and name not in new.features:
                raise CraftError(
                    f"the policy reads {name}, which the old dataset {old.repo_id} has and the new one {new.repo_id} "
                    "has not, so their frames cannot be in one batch: use datasets with the same cameras and states"
                )
            if name in old.features and _shape(old, name) != _shape(new, name):
                raise CraftError(
                    f"{name} has the shape {_shape(old, name)} in the old dataset {old.repo_id} and "
                    f"{_shape(new, name)} in the new one {new.repo_id}, so their frames cannot be in one batch: "
                    "resize one of them"
                )
        shared = {name for name in shared if name in old.features and _shape(old, name) == _shape(new, name)}
    return shared


def _shape(meta: Any, name: str) -> tuple[int, ...]:
    return tuple(meta.features[name]["shape"])


def _shows_bar(context: Context) -> bool:
    return bool(context.accelerator.is_main_process) and bar_is_welcome()


def _read(frames: Demonstrations, features: set[str], shows_bar: bool) -> dict[str, Tensor | list[Any]]:
    """All frames as one batch: tensors [N, ...] and lists of N."""
    columns: dict[str, list[Any]] = {}
    with tqdm(total=len(frames), desc="old frames", unit="frame", delay=_BAR_AFTER_S, disable=not shows_bar) as bar:
        for batch in frames.batches(_READ_AT_ONCE):
            for key, value in batch.items():
                if key == _TASK or key.removesuffix(_IS_PAD) in features:
                    columns.setdefault(key, []).append(value)
            bar.update(len(batch[_TASK]))
    return {
        key: torch.cat(parts) if isinstance(parts[0], Tensor) else [item for part in parts for item in part]
        for key, parts in columns.items()
    }


def _joined(new: Any, old: Tensor | list[Any], drawn: Tensor) -> Any:
    """Rows of the new batch, then the drawn rows of the buffer, in the new batch's dtype and on its device."""
    if not isinstance(old, Tensor):
        return [*new, *(old[index] for index in drawn.tolist())]
    rows = old.index_select(0, drawn).to(new.device)
    if rows.dtype == torch.uint8 and new.is_floating_point():
        # lerobot gives images of image datasets as floats, those of videos as uint8.
        rows = rows.to(new.dtype) / 255.0
    return torch.cat([new, rows.to(new.dtype)])
