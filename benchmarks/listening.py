"""Does `craft listen` foretell lost success? Its share against what rollouts lost, over the runs of a bench.

    python benchmarks/listening.py outputs/bench/results.json

takes results of `craft bench` whose cells are still there. Every policy acts in frames of the new task's demonstrations
under all instructions; the share of each old instruction's difference from the new one that is gone is ranked against
the success that the old task lost. Beside it, for comparison: how far the actions on old frames drifted.
"""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tqdm import tqdm

import lerobot_craft.tiny  # noqa: F401  registers the small policies
from dated import RESULTS, dated, write
from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.bench.metaworld.tasks import find_task
from lerobot_craft.evaluation.acting import Frames, actions_under, spread_of_actions, take_frames
from lerobot_craft.evaluation.correlation import Pair, pairs_per_task, spearman_of
from lerobot_craft.evaluation.intervals import FloatArray
from lerobot_craft.evaluation.listening import compare
from lerobot_craft.evaluation.results import Correlation, Run, read_results
from lerobot_craft.lerobot_api.datasets import open_dataset

LAST = Path("checkpoints/last/pretrained_model")
BATCH, SEED = 32, 0


class Listener:
    """Compares policies with their base; what a base does in a dataset's frames is computed once."""

    def __init__(self, frames: int) -> None:
        self._frames = frames
        self._of_base: dict[tuple[str, str], tuple[Frames, FloatArray, FloatArray, FloatArray]] = {}

    def gone(self, run: Run) -> dict[str, float]:
        """Old task -> share of its difference from the new instruction that is gone, where they were told apart."""
        flags = flags_of(run)
        tasks = [*run.old_tasks, run.new_task]
        told = [find_task(task).instruction for task in tasks]
        key = flags["--policy.path"], flags["--dataset.root"]
        if key not in self._of_base:
            base = load_teacher(key[0], ("--device=cpu",))
            root = Path(key[1])
            dataset = open_dataset(f"craft/{root.name}", root, policy_config=base.config)
            frames = take_frames(base, dataset, self._frames, BATCH, SEED)
            first, again = (actions_under(base, frames, told, seed) for seed in (0, 1))
            self._of_base[key] = frames, first, again, spread_of_actions(base, first)
        frames, first, again, spread = self._of_base[key]
        policy = load_teacher(Path(flags["--output_dir"]) / LAST, ("--device=cpu",))
        new = len(tasks) - 1
        learned = [number == new for number in range(len(tasks))]
        found = compare(first, again, actions_under(policy, frames, told, 0), frames.episode, spread, learned)
        return {task: gone.value for i, task in enumerate(run.old_tasks) if (gone := found["gone"][i][new]) is not None}


def flags_of(run: Run) -> dict[str, str]:
    """Flags of the `craft train` that made a run."""
    return dict(word.split("=", 1) for word in shlex.split(run.command) if word.startswith("--") and "=" in word)


def has_own_policy(run: Run) -> bool:
    """Whether the policy that was played is the last checkpoint of its training, with weights of its own."""
    last = Path(flags_of(run)["--output_dir"]) / LAST
    return run.method != "merge" and last.is_dir() and not (last / "adapter_config.json").exists()


def as_text(found: Correlation | None) -> str:
    if found is None:
        return "not known"
    interval = "" if found.low is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.rho:.2f}{interval}, n = {found.n}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="results.json of `craft bench`, its cells beside it")
    parser.add_argument("--frames", type=int, default=64, help="in which the policies act")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    runs = [run for path in options.results for run in read_results(path).runs if has_own_policy(run)]
    if not runs:
        parser.error("none of these runs has its checkpoint any more: give results whose cells are still there")
    listener = Listener(options.frames)
    heard = [listener.gone(run) for run in tqdm(runs, unit="run")]
    pairs = {
        (number, task): Pair(run, share, run.base[task] - run.after[task])
        for number, (run, gone) in enumerate(zip(runs, heard, strict=True))
        for task, share in gone.items()
    }
    near = [pair for (_, task), pair in pairs.items() if task in pair.run.same_scene]
    correlations = {
        "gone, same scene": spearman_of(near),
        "gone, every old task": spearman_of(list(pairs.values())),
        "drift of the actions on old frames, every old task": spearman_of(pairs_per_task(runs, "action")),
    }
    for name, found in correlations.items():
        print(f"{name}: {as_text(found)}")
    rows: list[dict[str, Any]] = [
        {
            "scenario": run.scenario,
            "method": run.method,
            "tier": run.tier,
            "seed": run.seed,
            "gone": gone,
            "lost": {task: run.base[task] - run.after[task] for task in run.old_tasks},
        }
        for run, gone in zip(runs, heard, strict=True)
    ]
    shown = {name: None if found is None else vars(found) for name, found in correlations.items()}
    write(dated("listening", frames=options.frames, spearman=shown, runs=rows), options.output_dir)


if __name__ == "__main__":
    main()
