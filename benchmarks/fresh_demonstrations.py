"""Did a run learn its demonstrations by heart? The policy's loss on them, and on fresh ones of another seed.

    python benchmarks/fresh_demonstrations.py outputs/bench/cells/run-*-naive-* outputs/bench/cells/run-*-joint-*

takes cells of `craft bench`, in the directory that the bench ran in. Both losses are lerobot's own, in eval mode, on
frames spread over all episodes: alike, if what is learned from some demonstrations holds for all of the task.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from lerobot.utils.constants import OBS_IMAGES
from tqdm import tqdm

import lerobot_craft.tiny  # noqa: F401  registers the small policies
from dated import RESULTS, dated, write
from lerobot_craft.anchors.plan import choose_frames
from lerobot_craft.anchors.teacher import Teacher, load_teacher
from lerobot_craft.bench.cell_files import RESULT_FILE
from lerobot_craft.bench.metaworld.recording import record
from lerobot_craft.bench.metaworld.tasks import VIEWS, View, state_names
from lerobot_craft.lerobot_api.datasets import RawBatch, frame_table, open_dataset, open_metadata
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import mode

CHECKPOINT = Path("train/checkpoints/last/pretrained_model")
OTHER_SEED = 77_001  # of no run
BATCH = 64


class Losses:
    """Of policies on some frames of datasets; each dataset is read once, and fresh ones are recorded when asked for."""

    def __init__(self, frames: int, episodes: int, scratch: Path) -> None:
        self._frames, self._episodes, self._scratch = frames, episodes, scratch
        self._read: dict[tuple[Path, str], list[RawBatch]] = {}

    def of(self, cell: Path) -> dict[str, Any]:
        """A cell's policy on its own demonstrations and on fresh ones, beside its success."""
        data = json.loads((cell / CHECKPOINT / "train_config.json").read_text())["dataset"]
        task, own = data["repo_id"].removeprefix("craft/new-"), Path(data["root"])
        fresh = self._fresh(task, view_of(own))
        policy = load_teacher(cell / CHECKPOINT, ("--device=cpu",))
        successes = json.loads((cell / RESULT_FILE).read_text())["successes"][task]
        return {
            "cell": cell.name,
            "task": task,
            "steps": json.loads((cell / "train/run.json").read_text())["steps"],
            "loss_on_its_demonstrations": mean_loss(policy, self._batches(policy, own)),
            "loss_on_fresh_ones": mean_loss(policy, self._batches(policy, fresh)),
            "success": fmean(successes),
            "n_episodes": len(successes),
        }

    def _fresh(self, task: str, view: View) -> Path:
        root = self._scratch / view / task
        return root if root.exists() else record(root, [task], self._episodes, OTHER_SEED, view=view, progress=False)

    def _batches(self, policy: Teacher, root: Path) -> list[RawBatch]:
        key = root, policy.config.type  # a policy's type decides how many actions belong to a frame
        if key not in self._read:
            dataset = open_dataset(f"craft/{root.name}", root, policy_config=policy.config)
            rows = choose_frames(frame_table(dataset), self._frames, OTHER_SEED)
            wanted = [(0, rows[start : start + BATCH]) for start in range(0, len(rows), BATCH)]
            self._read[key] = list(read_batches([dataset], wanted))
        return self._read[key]


def view_of(data: Path) -> View:
    """What a dataset of the bench shows, told by its state."""
    state = open_metadata(f"craft/{data.name}", data).features["observation.state"]
    return next(view for view in VIEWS if list(state_names(view)) == list(state["names"]))


def mean_loss(policy: Teacher, batches: list[RawBatch]) -> float:
    """Mean of lerobot's loss over all frames; noise and times of a flow policy are the same for all policies."""
    total = frames = 0.0
    with torch.random.fork_rng([]), mode(policy.policy, train=False), torch.inference_mode():
        torch.manual_seed(OTHER_SEED)
        for raw in batches:
            cameras = [name for name in raw if name.startswith(OBS_IMAGES)]
            size = len(raw["task"])
            total += float(policy.policy.forward(policy_batch(raw, cameras, policy.preprocessor))[0]) * size
            frames += size
    return total / frames


def as_markdown(rows: list[dict[str, Any]]) -> str:
    head = "| run | steps | loss on its demonstrations | on fresh ones | success |\n|---|---|---|---|---|\n"
    return head + "\n".join(
        f"| {row['cell']} | {row['steps']:,} | {row['loss_on_its_demonstrations']:.3f} | "
        f"{row['loss_on_fresh_ones']:.3f} | {row['success']:.2f} |"
        for row in rows
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", type=Path, help="directories of finished runs of `craft bench`")
    parser.add_argument("--frames", type=int, default=1024, help="on which each loss is measured")
    parser.add_argument("--episodes", type=int, default=20, help="fresh demonstrations of each task")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    for cell in options.cells:
        if not (cell / RESULT_FILE).is_file() or not (cell / CHECKPOINT).is_dir():
            parser.error(f"{cell} is no finished run of `craft bench`: give directories run-* below its cells/")
    with tempfile.TemporaryDirectory() as scratch:
        losses = Losses(options.frames, options.episodes, Path(scratch))
        rows = [losses.of(cell) for cell in tqdm(options.cells, unit="run")]
    print(as_markdown(rows))
    report = dated("fresh-demonstrations", frames=options.frames, episodes=options.episodes, runs=rows)
    write(report, options.output_dir)


if __name__ == "__main__":
    main()
