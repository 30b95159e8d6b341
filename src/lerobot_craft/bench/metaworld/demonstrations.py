"""Record the experts as a LeRobotDataset v3: seeded, in parallel, complete or not at all."""

import functools
import math
import multiprocessing
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from lerobot_craft.bench.metaworld.episodes import Episode, attempts
from lerobot_craft.bench.metaworld.tasks import View, find_task
from lerobot_craft.bench.metaworld.writing import write_dataset
from lerobot_craft.errors import CraftError

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
