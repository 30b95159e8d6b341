"""A memory in the form of a dataset: the same samples as its source datasets."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.anchors.build import OpenDataset
from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.images import decode_image
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.datasets import FrameTable, StoredFrames, StoredMeta
from lerobot_craft.lerobot_api.features import require_features
from lerobot_craft.memory.collect import episodes_of
from lerobot_craft.memory.format import ACTION, IS_PAD, Memory, input_column
from lerobot_craft.policies import adapter_for

NAME = "craft_memory"


class MemoryDataset(StoredFrames):
    """The frames of a memory, as lerobot's DataLoader would give them for this policy.

    Args:
        memory: A memory of this kind of policy.
        config: The policy's config.

    Raises:
        CraftError: The memory belongs to another policy, robot or camera set.
    """

    def __init__(self, memory: Memory, config: Any) -> None:
        self._memory = memory
        self._has_history = config.observation_delta_indices is not None
        self._pictures = {
            name: column.rows()
            for name, feature in memory.input_features.items()
            if feature.codec == "png" and isinstance(column := memory.columns[input_column(name)], Ragged)
        }
        columns = {name: memory.dense(name).numpy().astype(np.int64) for name in ("position", "length")}
        task = memory.dense("instruction").numpy().astype(np.int64)
        self.table = FrameTable(task=task, episode=episodes_of(memory), **columns)
        self.meta = StoredMeta(NAME, self._features(), memory.instructions, tuple(self._pictures))
        _require_fit(memory, config, self.meta)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Observations with their history, the action chunk and the instruction of one frame."""
        memory = self._memory
        sample: dict[str, Any] = {}
        for name, feature in memory.input_features.items():
            if name in self._pictures:
                sample[name] = decode_image(self._pictures[name][row], feature.shape)
            else:
                sample[name] = memory.dense(input_column(name))[row]
        sample |= {name: memory.dense(name)[row] for name in (ACTION, IS_PAD)}
        return sample | {"task": memory.instructions[int(self.table.task[row])]}

    def numbers(self, name: str) -> Tensor:
        """A feature [N, ...] at each frame's own time; for actions, the first of each chunk."""
        values = self._memory.dense(name if name == ACTION else input_column(name))
        if name == ACTION:
            return values[:, 0]
        return values[:, -1] if self._has_history else values

    def _features(self) -> dict[str, dict[str, Any]]:
        features: dict[str, dict[str, Any]] = {}
        for name, feature in self._memory.input_features.items():
            if feature.codec == "png":
                channels, height, width = feature.shape[-3:]
                features[name] = {"dtype": "image", "shape": (height, width, channels)}
            else:
                shape = feature.shape[1:] if self._has_history else feature.shape
                features[name] = {"dtype": "float32", "shape": tuple(shape)}
        width = self._memory.dense(ACTION).shape[-1]
        return features | {ACTION: {"dtype": "float32", "shape": (width,)}}


def as_old_data(memory: Memory, config: Any) -> OpenDataset:
    """A memory in the place of an old dataset."""
    return OpenDataset(MemoryDataset(memory, config), NAME, None, None, memory.fingerprint())


def _require_fit(memory: Memory, config: Any, meta: StoredMeta) -> None:
    """Refuse a memory whose policy type, features, history or chunk length differ from the policy's."""
    adapter = adapter_for(config)
    if memory.policy_type != adapter.policy_type:
        raise CraftError(
            f"the memory is of a {memory.policy_type} and this policy is a {adapter.policy_type}: use a memory of this "
            "policy (`craft remember`), or leave it out with --craft.memory=off"
        )
    require_features(
        config,
        meta.features,
        dataset="in the memory",
        masks_missing_cameras=adapter.masks_missing_cameras(SimpleNamespace(config=config)),
        actions=True,
    )
    steps = memory.dense(ACTION).shape[1]
    if steps != (wanted := len(config.action_delta_indices)):
        raise CraftError(
            f"the memory has chunks of {steps} actions and this policy predicts {wanted}: keep its chunk size, or make "
            "the memory again with `craft remember`"
        )
    past = None if config.observation_delta_indices is None else len(config.observation_delta_indices)
    for feature in memory.input_features.values():
        found = feature.shape[0] if len(feature.shape) == (4 if feature.codec == "png" else 2) else None
        # lerobot drops this axis for a single video frame, but keeps it for a single image.
        if found != past and not (feature.codec == "png" and {found, past} == {1, None}):
            raise CraftError(
                f"the memory's observations have {found or 1} steps and this policy reads {past or 1}: keep its number "
                "of observation steps, or make the memory again with `craft remember`"
            )


def decoded_bytes(memory: Memory, config: Any) -> int:
    """Total bytes of the decoded images. Decoding each one finds damage that checksums miss."""
    dataset = MemoryDataset(memory, config)
    sizes = [
        value.nbytes
        for row in range(len(dataset))
        for value in dataset[row].values()
        if isinstance(value, Tensor) and value.dtype == torch.uint8
    ]
    return sum(sizes)
