"""Record the experts as a LeRobotDataset v3: seeded, in parallel, complete or not at all.

Actions are recorded clean and executed with noise, so that a policy learns to recover. Nothing here imports torch.
"""

import functools
import math
import multiprocessing
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from lerobot_craft.bench.metaworld.environment import CAMERA
from lerobot_craft.bench.metaworld.simulation import FloatArray, Simulation, UInt8Array
from lerobot_craft.bench.metaworld.tasks import ACTION_NAMES, FPS, IMAGE_SIDES, View, find_task, state_names
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import quiet_video

_LOUDEST = 0.2  # largest noise std of an episode, in units of the longest step; drawn per episode
_MOVES = np.array([1.0, 1.0, 1.0, 0.0])  # no noise on the gripper
TAIL = 8  # frames after success, to teach the policy to stay there


@dataclass(frozen=True)
class Episode:
    """T frames of one attempt."""

    states: FloatArray  # [T, 7], seen [T, 4]
    actions: FloatArray  # [T, 4]
    images: UInt8Array | None  # [T, side, side, 3]; None: no pictures


def attempt(task: str, seed: int, number: int, view: View = "told") -> Episode | None:
    """One attempt, or None if the expert failed. It depends only on task, seed and number.

    Args:
        task: Its name in `TASKS`.
        seed: Seed of the recording.
        number: Number of the attempt.
        view: What is recorded; `told` has no pictures.
    """
    simulation = _simulation(task, view)
    # The task is part of the seed: an old task's frames must not start where the new task's do.
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), number])
    simulation.reset(int(rng.integers(2**31)))
    loudness = _LOUDEST * rng.uniform()
    states, actions, images = [], [], []
    end = None  # the last frame, once it is known
    for frame in range(simulation.task.max_steps + TAIL):
        action = simulation.expert()
        states.append(simulation.state())
        actions.append(action)
        if view == "seen":
            images.append(simulation.image(IMAGE_SIDES[view]))
        success = simulation.step(action + loudness * _MOVES * rng.standard_normal(len(_MOVES)))
        if success and end is None and frame < simulation.task.max_steps:
            end = frame + TAIL
        if frame == end:
            return Episode(np.stack(states), np.stack(actions), np.stack(images) if images else None)
    return None


def attempts(task: str, seed: int, numbers: range, view: View = "told") -> list[Episode | None]:
    """Several attempts, as one piece of work for a process."""
    return [attempt(task, seed, number, view) for number in numbers]


@cache
def _simulation(task: str, view: View) -> Simulation:
    return Simulation(task, view)


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


_BLOCK = 5  # attempts per piece of work
_FEWEST_SUCCESSES = 0.5  # of the attempts; an expert below this cannot do its task

# A piece of work: task, attempt numbers.
_Work = tuple[str, range]
_Perform = Callable[[list[_Work]], Iterator[list[Episode | None]]]


def record(
    root: Path,
    tasks: Sequence[str],
    episodes: int,
    seed: int,
    *,
    view: View = "told",
    jobs: int = 1,
    progress: bool = True,
) -> Path:
    """Write `episodes` successful demonstrations of each task to `root`, which must not exist, and return it.

    Tasks alternate by episode. The values depend only on the seed, not on the number of processes.

    Args:
        root: Output directory; the repo_id is `craft/` and the directory's name.
        tasks: Names in `TASKS`.
        episodes: Episodes per task.
        seed: Seed of start states and noise.
        view: What is recorded; `told` has no pictures, so its camera is black.
        jobs: Simulation processes.
        progress: Show a progress bar.
    """
    if root.exists():
        raise CraftError(f"{root} is there already: remove it, or record to another place.")
    for task in tasks:
        find_task(task)
    # Next to the final place, so that the last step is a rename: an interrupted recording leaves no partial dataset.
    partial = root.with_name(f"{root.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    show = functools.partial(tqdm, total=len(tasks) * episodes, unit="episode", disable=not progress)
    with _processes(jobs, seed, view) as perform, show(desc="demonstrations") as bar:
        found = _demonstrate(tasks, episodes, perform, bar.update)
    try:
        with show(desc="dataset") as bar:
            write_dataset(partial, f"craft/{root.name}", found, view, bar.update)
        partial.rename(root)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return root


def _demonstrate(
    tasks: Sequence[str], episodes: int, perform: _Perform, advance: Callable[[int], object]
) -> dict[str, list[Episode]]:
    """The first `episodes` successes of each task, in the order of attempts."""
    found: dict[str, list[Episode]] = {task: [] for task in tasks}
    made = dict.fromkeys(tasks, 0)  # attempts
    while short := [task for task in found if len(found[task]) < episodes]:
        work = []
        for task in short:
            if len(found[task]) < _FEWEST_SUCCESSES * made[task]:
                raise CraftError(
                    f"The expert of {task} succeeded in {len(found[task])} of {made[task]} attempts, too few to record "
                    "it: choose another task, or give this one more max_steps in bench/metaworld/tasks.py."
                )
            blocks = math.ceil((episodes - len(found[task])) / _BLOCK)
            work += [(task, range(made[task] + i * _BLOCK, made[task] + (i + 1) * _BLOCK)) for i in range(blocks)]
            made[task] += blocks * _BLOCK
        for (task, _), block in zip(work, perform(work), strict=True):
            fresh = [episode for episode in block if episode is not None][: episodes - len(found[task])]
            found[task] += fresh
            advance(len(fresh))
    return found


@contextmanager
def _processes(jobs: int, seed: int, view: View) -> Iterator[_Perform]:
    """A function that performs pieces of work in order, here or in several processes."""
    if jobs <= 1:
        yield lambda work: (attempts(task, seed, numbers, view) for task, numbers in work)
        return
    # A fork would inherit torch's threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:

        def perform(work: list[_Work]) -> Iterator[list[Episode | None]]:
            futures = [pool.submit(attempts, task, seed, numbers, view) for task, numbers in work]
            return (future.result() for future in futures)

        try:
            yield perform
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
