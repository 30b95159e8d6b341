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

import torch

import lerobot_craft.tiny  # noqa: F401  registers the small policies
from dated import RESULTS, dated, write
from lerobot_craft.anchors.build import build_cache
from lerobot_craft.anchors.loader import AnchorLoader, open_cache, retained_of
from lerobot_craft.anchors.prepare import prepare
from lerobot_craft.anchors.ranks import Ranks
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.anchors.student_values import student_drift
from lerobot_craft.policies import adapter_for, mode
from lerobot_craft.teacher.load import Teacher, load_teacher
from lerobot_craft.training.anchoring.asking import policy_inputs
from lerobot_craft.training.anchoring.budget_units import units_of
from lerobot_craft.training.config import CraftConfig

CHECKPOINT = Path("checkpoints/last/pretrained_model")
OTHER_SEED = 77_001  # of no run
BATCH = 64


def measured(cell: Path, fresh: int) -> dict[str, Any]:
    """The drift of a cell's policy on its anchors and on as many fresh ones."""
    checkpoint = cell / "train" / CHECKPOINT
    run = json.loads((cell / "train/run.json").read_text())
    student = load_teacher(checkpoint, ["--device=cpu"])
    own = open_cache(cell / "anchors", verify=False)
    with tempfile.TemporaryDirectory() as scratch:
        config = same_recipe(checkpoint, Path(scratch) / "fresh", fresh)
        build_cache(prepare(config, load_teacher(run["teacher"], ["--device=cpu"])), config.output_dir, ranks=Ranks())
        unseen = drift_on(student, open_cache(config.output_dir))
    visits = run["batch_size"] * run["steps"]  # as many anchors as samples in every step
    return {
        "cell": cell.name,
        "anchors": len(own.store),
        "visits_of_each": visits / len(own.store),
        "drift_on_its_anchors": drift_on(student, own),
        "drift_on_fresh_ones": unseen,
    }


def same_recipe(checkpoint: Path, directory: Path, anchors: int) -> BuildConfig:
    """What the run's anchors were made by, with another seed."""
    saved = json.loads((checkpoint / "craft_config.json").read_text())
    new = json.loads((checkpoint / "train_config.json").read_text())["dataset"]
    known = {field.name for field in dataclasses.fields(CraftConfig)} - {"anchor_cache_dir", "old_dataset"}
    craft = CraftConfig(**{name: value for name, value in saved.items() if name in known})
    config = craft.build_config(directory, DatasetFlags(new["repo_id"], new["root"] or ""), OTHER_SEED)
    return dataclasses.replace(config, num_samples=anchors)


@torch.no_grad()
def drift_on(student: Teacher, anchors: AnchorLoader) -> float:
    adapter, manifest = adapter_for(student.config), anchors.manifest
    retained = retained_of(manifest, adapter, student.policy)
    loss_type = retained.loss_types(adapter)[0]
    drifts, tasks = [], []
    with mode(student.policy, train=adapter.train_mode):
        for indices in torch.arange(len(anchors.store)).split(BATCH):
            batch = anchors.take(indices)
            inputs = policy_inputs(batch.raw, student.preprocessor)
            drifts.append(student_drift(adapter, student.policy, inputs, batch.columns, retained, loss_type))
            tasks.append(batch.instruction)
    drift, task = torch.cat(drifts), torch.cat(tasks)
    units = units_of(manifest.scales, manifest.instructions, loss_type)
    return fmean(drift[task == number].mean().item() / unit for number, unit in enumerate(units))


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
