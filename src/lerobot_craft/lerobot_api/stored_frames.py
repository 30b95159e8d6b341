"""Where frames belong, and frames that are kept elsewhere than in a LeRobotDataset and are read like one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset


@dataclass(frozen=True)
class FrameTable:
    """Where every frame of an opened dataset belongs: one row per frame, row i being the frame `dataset[i]`."""

    task: npt.NDArray[np.int64]  # index into the dataset's instructions
    episode: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]  # frames since the episode began
    length: npt.NDArray[np.int64]  # of the frame's episode

    def __len__(self) -> int:
        return len(self.task)

    def take(self, rows: npt.NDArray[np.int64]) -> "FrameTable":
        """Only these rows, in this order."""
        return FrameTable(self.task[rows], self.episode[rows], self.position[rows], self.length[rows])


@dataclass(frozen=True)
class StoredMeta:
    """What readers of frames ask of a dataset's metadata.

    Attributes:
        repo_id: A name for messages.
        features: As in lerobot's `info.json`: dtype and shape of each; images are [height, width, channels].
        instructions: A frame's task index points into them.
        camera_keys: Features that are colour images.
    """

    repo_id: str
    features: Mapping[str, Mapping[str, Any]]
    instructions: Sequence[str]
    camera_keys: Sequence[str]
    depth_keys: Sequence[str] = ()
    video_keys: Sequence[str] = ()
    has_language_columns: bool = field(default=False, init=False)


class StoredFrames(Dataset[dict[str, Any]]):
    """Single frames with their history and their chunk of actions already in them; images are uint8.

    A subclass holds `meta` and `table`, of which row i is the frame `self[i]`.
    """

    meta: StoredMeta
    table: FrameTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One frame as lerobot's DataLoader takes it: tensors, and `task`."""
        raise NotImplementedError

    def numbers(self, name: str) -> Tensor:
        """A feature [N, ...] of every frame at its own time, without history."""
        raise NotImplementedError
