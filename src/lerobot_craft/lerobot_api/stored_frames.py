"""The frame table of a dataset, and frames that are stored outside a LeRobotDataset but read like one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class FrameTable:
    """Task, episode and position of every frame in an opened dataset: row i is the frame `dataset[i]`."""

    task: npt.NDArray[np.int64]  # index into the dataset's instructions
    episode: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]  # frames since the episode started
    length: npt.NDArray[np.int64]  # length of the frame's episode

    def __len__(self) -> int:
        return len(self.task)

    def take(self, rows: npt.NDArray[np.int64]) -> "FrameTable":
        """Only these rows, in this order."""
        return FrameTable(self.task[rows], self.episode[rows], self.position[rows], self.length[rows])


@dataclass(frozen=True)
class StoredMeta:
    """The part of a dataset's metadata that readers of frames use.

    Attributes:
        repo_id: A name for messages.
        features: As in lerobot's `info.json`: dtype and shape of each; images are [height, width, channels].
        instructions: A frame's task index refers to this list.
        camera_keys: Features that are color images.
    """

    repo_id: str
    features: Mapping[str, Mapping[str, Any]]
    instructions: Sequence[str]
    camera_keys: Sequence[str]
    depth_keys: Sequence[str] = ()
    video_keys: Sequence[str] = ()
    has_language_columns: bool = field(default=False, init=False)


class StoredFrames(Dataset[dict[str, Any]]):
    """Single frames that include their history and action chunk; images are uint8.

    A subclass has `meta` and `table`; row i of the table is the frame `self[i]`.
    """

    meta: StoredMeta
    table: FrameTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One frame for lerobot's DataLoader: tensors, and `task`."""
        raise NotImplementedError

    def numbers(self, name: str) -> Tensor:
        """A feature [N, ...] at each frame's own time, without history."""
        raise NotImplementedError
