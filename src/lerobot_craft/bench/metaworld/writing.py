"""Demonstrations as a LeRobotDataset v3, written by lerobot itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from lerobot_craft.bench.metaworld.environment import CAMERA
from lerobot_craft.bench.metaworld.episodes import Episode
from lerobot_craft.bench.metaworld.tasks import ACTION_NAMES, FPS, IMAGE_SIDES, View, find_task, state_names
from lerobot_craft.lerobot_api import quiet_video


def write_dataset(
    root: Path,
    repo_id: str,
    found: Mapping[str, Sequence[Episode]],
    view: View,
    advance: Callable[[], object] = lambda: None,
) -> None:
    """Write episodes of several tasks, the same number of each; tasks alternate by episode.

    Args:
        root: Output directory; must not exist.
        repo_id: lerobot's name of the dataset.
        found: The episodes of each task.
        view: What they show.
        advance: Called after each episode.
    """
    quiet_video()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    side, names = IMAGE_SIDES[view], list(state_names(view))
    camera = f"observation.images.{CAMERA}"
    features: dict[str, dict[str, Any]] = {
        camera: {"dtype": "image", "shape": (side, side, 3), "names": ["height", "width", "channels"]},
        "observation.state": {"dtype": "float32", "shape": (len(names),), "names": names},
        "action": {"dtype": "float32", "shape": (len(ACTION_NAMES),), "names": list(ACTION_NAMES)},
    }
    dataset = LeRobotDataset.create(repo_id, fps=FPS, features=features, root=root, use_videos=False)
    black = np.zeros((side, side, 3), np.uint8)
    with embedding_at_once():
        for turn in zip(*found.values(), strict=True):
            for task, episode in zip(found, turn, strict=True):
                instruction = find_task(task).instruction
                for frame, (state, action) in enumerate(zip(episode.states, episode.actions, strict=True)):
                    picture = black if episode.images is None else episode.images[frame]
                    values = {camera: picture, "observation.state": state, "action": action}
                    dataset.add_frame({**values, "task": instruction})
                dataset.save_episode()
                advance()
        dataset.finalize()


@contextmanager
def embedding_at_once() -> Iterator[None]:
    """Make lerobot put an episode's pictures into its table at once.

    lerobot 0.6.1 does it row by row with a progress bar per episode, which doubles the time. The values are the same.
    """
    from datasets.table import embed_table_storage  # type: ignore[import-untyped]
    from lerobot.datasets import dataset_writer

    stock = dataset_writer.embed_images

    def embed(rows: Any) -> Any:
        # All rows in one call; our own fingerprint avoids hashing the function for each episode.
        whole = {"batched": True, "batch_size": len(rows), "new_fingerprint": "embedded"}
        return rows.with_format("arrow").map(embed_table_storage, **whole).with_format(**rows.format)

    dataset_writer.embed_images = embed
    try:
        with _no_bars():
            yield
    finally:
        dataset_writer.embed_images = stock


@contextmanager
def _no_bars() -> Iterator[None]:
    from datasets.utils import logging as bars  # type: ignore[import-untyped]

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()
