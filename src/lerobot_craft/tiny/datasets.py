"""Small real LeRobotDatasets: written by lerobot itself, read back by lerobot itself, without a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lerobot_craft.lerobot_api import quiet_video

FPS = 10


def make_local_dataset(
    root: Path,
    tasks: Mapping[str, int] | Sequence[str],
    episodes_per_task: int = 3,
    frames_per_episode: int = 12,
    cameras: Sequence[str] = ("observation.images.top",),
    image_size: int | tuple[int, int] = 32,
    state_dim: int = 4,
    action_dim: int = 4,
    seed: int = 0,
    video: bool = False,
    fps: int = FPS,
) -> Path:
    """Write a LeRobotDataset v3 to `root` (which must not exist yet) and return `root`.

    Actions are smooth in time and differ by task, the state follows them with a lag, and each image shows a square
    whose colour is the task and whose place is the time. The same arguments give the same values.

    Args:
        root: Where the dataset goes.
        tasks: Instructions; a mapping gives each its own number of episodes. Tasks alternate, episode by episode.
        episodes_per_task: Episodes of each task if `tasks` is no mapping.
        frames_per_episode: Length of the first episode; every later episode is one frame longer or shorter by turns.
        cameras: Image features.
        image_size: Height and width in pixels; one number for both.
        state_dim: Size of `observation.state`.
        action_dim: Size of `action`.
        seed: Seed of starting states and episode noise.
        video: Store images as videos (slower to write, and lossy).
        fps: Frames per second.
    """
    quiet_video()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    image = {
        "dtype": "video" if video else "image",
        "shape": (*size, 3),
        "names": ["height", "width", "channels"],
    }
    features = {
        **{camera: dict(image) for camera in cameras},
        "observation.state": _vector("state", state_dim),
        "action": _vector("action", action_dim),
    }
    dataset = LeRobotDataset.create(f"local/{root.name}", fps=fps, features=features, root=root, use_videos=video)
    rng = np.random.default_rng(seed)
    for number, (task_number, task) in enumerate(_episode_order(tasks, episodes_per_task)):
        length = frames_per_episode + (0, 1, -1)[number % 3]
        states, actions = _movement(rng, task_number, length, state_dim, action_dim)
        for frame in range(length):
            pictures = {
                camera: _picture(size, task_number, camera_number, frame / length)
                for camera_number, camera in enumerate(cameras)
            }
            dataset.add_frame({**pictures, "observation.state": states[frame], "action": actions[frame], "task": task})
        dataset.save_episode(parallel_encoding=False)
    dataset.finalize()
    return root


def _vector(name: str, size: int) -> dict[str, object]:
    return {"dtype": "float32", "shape": (size,), "names": [f"{name}_{i}" for i in range(size)]}


def _episode_order(tasks: Mapping[str, int] | Sequence[str], episodes_per_task: int) -> list[tuple[int, str]]:
    counts = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks, episodes_per_task)
    return [
        (number, task)
        for turn in range(max(counts.values()))
        for number, (task, count) in enumerate(counts.items())
        if turn < count
    ]


def _movement(
    rng: np.random.Generator, task_number: int, length: int, state_dim: int, action_dim: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A swing whose frequency is the task's: states [T, S] follow actions [T, A] with a lag."""
    time = np.linspace(0.0, 1.0, length)[:, None]
    start = rng.uniform(-0.5, 0.5)
    frequency = 0.5 + 0.5 * task_number

    def swing(dimensions: int, lag: float) -> npt.NDArray[Any]:
        phase = np.arange(dimensions)[None] * 0.7
        return (np.sin(2 * np.pi * frequency * (time - lag) + phase) + start).astype(np.float32)

    return swing(state_dim, 0.1), swing(action_dim, 0.0)


def _picture(size: tuple[int, int], task_number: int, camera_number: int, phase: float) -> npt.NDArray[Any]:
    """A grey field [H, W, 3] with a square: its colour says the task, its place the time."""
    height, width = size
    picture = np.full((height, width, 3), 40 + 30 * camera_number, dtype=np.uint8)
    side = max(2, min(size) // 4)
    left = int(phase * (width - side))
    top = (height - side) // 2
    colour = [(90 * (task_number + 1) + 70 * channel) % 256 for channel in range(3)]
    picture[top : top + side, left : left + side] = colour
    return picture
