"""Did a run learn its anchors by heart? Its drift on them, and on others that the same recipe makes with another seed.

    python benchmarks/held_out.py outputs/bench/cells/run-*-craft-0frames-*

takes cells of `craft bench` whose anchors are made from new frames, in the directory that the bench ran in. Both drifts
are means over the old tasks in the budget's unit: alike, if what is learned on some anchors holds on all of their kind.
"""

import argparse
import dataclasses
import json
import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import lerobot_craft.tiny  # noqa: F401  registers the small policies
from dated import RESULTS, dated, write
from lerobot_craft.anchors.build import Ranks, build_cache, prepare
from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.bench.reference_drift import drift_on
from lerobot_craft.lerobot_api.rollouts import Player
from lerobot_craft.training.config import CraftConfig

CHECKPOINT = Path("checkpoints/last/pretrained_model")
OTHER_SEED = 77_001  # of no run
ON_CPU = ("--device=cpu",)


def measured(cell: Path, fresh: int) -> dict[str, Any]:
    """The drift of a cell's policy on its anchors and on as many fresh ones."""
    checkpoint = cell / "train" / CHECKPOINT
    run = json.loads((cell / "train/run.json").read_text())
    student = loaded(checkpoint)
    own = open_cache(cell / "anchors", verify=False)
    with tempfile.TemporaryDirectory() as scratch:
        config = same_recipe(checkpoint, Path(scratch) / "fresh", fresh)
        build_cache(prepare(config, load_teacher(run["teacher"], ON_CPU)), config.output_dir, ranks=Ranks())
        unseen = drift_on(student, open_cache(config.output_dir))
    visits = run["batch_size"] * run["steps"]  # as many anchors as samples in every step
    return {
        "cell": cell.name,
        "anchors": len(own.store),
        "visits_of_each": visits / len(own.store),
        "drift_on_its_anchors": fmean(drift_on(student, own).values()),
        "drift_on_fresh_ones": fmean(unseen.values()),
    }


def loaded(checkpoint: Path) -> Player:
    policy = load_teacher(checkpoint, ON_CPU)
    return Player(policy.policy, policy.preprocessor, policy.postprocessor, policy.config)


def same_recipe(checkpoint: Path, directory: Path, anchors: int) -> BuildConfig:
    """What the run's anchors were made by, with another seed."""
    saved = json.loads((checkpoint / "craft_config.json").read_text())
    new = json.loads((checkpoint / "train_config.json").read_text())["dataset"]
    known = {field.name for field in dataclasses.fields(CraftConfig)} - {"anchor_cache_dir", "old_dataset"}
    craft = CraftConfig(**{name: value for name, value in saved.items() if name in known})
    new_dataset = DatasetFlags(new["repo_id"], new["root"] or "")
    settings = craft.anchor_settings() | {"num_anchors": anchors}
    return BuildConfig(**settings, output_dir=directory, new_dataset=new_dataset, seed=OTHER_SEED)


def as_markdown(rows: list[dict[str, Any]]) -> str:
    head = "| run | anchors | visits of each | drift on them | on fresh ones |\n|---|---|---|---|---|\n"
    return head + "\n".join(
        f"| {row['cell']} | {row['anchors']:,} | {row['visits_of_each']:.1f} | {row['drift_on_its_anchors']:.3f} | "
        f"{row['drift_on_fresh_ones']:.3f} |"
        for row in rows
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", type=Path, help="directories of runs of `craft bench`")
    parser.add_argument("--anchors", type=int, default=2000, help="fresh ones")
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = [measured(cell, options.anchors) for cell in options.cells]
    print(as_markdown(rows))
    write(dated("held-out", fresh_anchors=options.anchors, runs=rows), options.output_dir)


if __name__ == "__main__":
    main()
