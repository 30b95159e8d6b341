"""What anchors cost: building a cache, its size, drawing from it, and the anchor pass. `make bench-anchors` runs this.

Real lerobot policies at a small size on a local dataset. Everything is a ratio of times taken in turns within one run:

- building against a bare loop that reads the same frames, runs the same preprocessor and makes the same forward passes
  without gradients, and does nothing with their results;
- drawing 64 anchors against a training step of 64 samples, both of a tiny policy;
- kinds of values against `token_ce`, the token-level mode, in bytes per anchor, in building and in the pass of
  training (forward and backward). The claim under test: a hidden cache is 60 times smaller, builds twice as fast and
  trains 1.5 times as fast as the token-level mode.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from dated import RESULTS, dated, write
from lerobot_craft.anchors.build import Job, Ranks, build_cache, prepare
from lerobot_craft.anchors.loader import open_cache
from lerobot_craft.anchors.observations import as_anchors
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.anchors.teacher import Teacher, load_teacher
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.anchors.verify import bytes_by_purpose
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.lerobot_api.pretrained import autocast
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import mode
from lerobot_craft.tiny.make import make_checkpoint, make_local_dataset
from lerobot_craft.tiny.pi import TinySizes

TASKS = ["open the drawer", "close the drawer", "press the red button"]
TOKEN_LEVEL = "token_ce"  # noqa: S105  # no password: a retention mode
KINDS: dict[str, dict[str, Any]] = {
    "hidden, pooled": {"retention_mode": "hidden"},
    "hidden, 2 layers x 2": {"retention_mode": "hidden", "layers_to_save": "-2,-1"},
    "hidden, per token": {"retention_mode": "hidden", "per_token": True},
    "action": {"retention_mode": "action"},
    TOKEN_LEVEL: {"retention_mode": "token_ce"},
}
DRAWN = 64
TINY = {"width": 64, "depth": 4, "image_size": 32}


def make_teacher(policy_type: str, root: Path, options: argparse.Namespace) -> Teacher:
    """A checked policy of about the size asked for, with 224-pixel images (256 image tokens in the pi family)."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    width = options.width
    sizes = TinySizes(
        width=width,
        depth=options.depth,
        mlp_dim=4 * width,
        head_dim=max(16, width // 8),
        expert_width=width // 2,
        expert_mlp_dim=2 * width,
        vision_width=width // 2,
        vision_mlp_dim=2 * width,
        patch_size=14 if policy_type != "smolvla" else 16,
    )
    dataset = LeRobotDataset("local/old", root=root / "old")
    features = dataset_to_policy_features(dataset.meta.features)
    actions = np.stack([dataset.hf_dataset[i]["action"] for i in range(len(dataset))])
    chunks = np.lib.stride_tricks.sliding_window_view(actions, 8, axis=0).transpose(0, 2, 1).copy()
    tile = 2 * sizes.patch_size  # smolvla merges patches two by two
    side = max(tile, options.image_size // tile * tile)
    overrides: dict[str, Any] = {
        "resize_imgs_with_padding" if policy_type == "smolvla" else "image_resolution": (side, side)
    }
    checkpoint = make_checkpoint(
        policy_type,
        root / policy_type,
        input_features={name: f for name, f in features.items() if name != "action"},
        output_features={"action": features["action"]},
        dataset_stats=dataset.meta.stats,
        instructions=TASKS,
        action_chunks=chunks,
        sizes=sizes,
        **overrides,
    )
    return load_teacher(checkpoint)


def job_of(kind: str, teacher: Teacher, root: Path, options: argparse.Namespace) -> Job:
    config = BuildConfig(
        output_dir=root / "unused",
        old_dataset=DatasetFlags("local/old", str(root / "old")),
        num_anchors=options.anchors,
        batch_size=options.batch,
        **KINDS[kind],
    )
    return prepare(config, teacher)


def build(job: Job, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    build_cache(job, directory, ranks=Ranks())


def bare_loop(job: Job) -> None:
    """The same frames, preprocessor and values as a build, and nothing else."""
    rows = np.split(np.arange(len(job.plan)), range(job.batch_size, len(job.plan), job.batch_size))
    datasets = [opened.dataset for opened in job.datasets]
    policy, adapter = job.teacher.policy, job.adapter
    with torch.no_grad(), mode(policy, train=adapter.train_mode):
        for chosen, raw in zip(rows, read_batches(datasets, [(0, job.plan.frame[r]) for r in rows]), strict=True):
            cameras = datasets[0].meta.camera_keys
            batch = policy_batch(as_anchors(raw, job.plan, chosen), cameras, job.teacher.preprocessor)
            with autocast(job.teacher.config):
                if job.retained.mode == "hidden":
                    adapter.hidden(policy, batch, job.retained.layers)
                else:
                    (fixed,) = adapter.fix(policy, batch, [np.random.default_rng(int(row)) for row in chosen])
                    adapter.output(policy, batch, fixed)
                    shown = adapter.demonstration(policy, batch, fixed)
                    if shown.fixed is not fixed:  # the budget's unit needs a pass over the demonstrated tokens
                        adapter.output(policy, batch, shown.fixed)


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_building(teacher: Teacher, root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    kinds = [kind for kind in KINDS if kind != TOKEN_LEVEL or teacher.config.type.startswith("pi0_fast")]
    jobs = {kind: job_of(kind, teacher, root, options) for kind in kinds}
    times: dict[str, tuple[list[float], list[float]]] = {kind: ([], []) for kind in kinds}
    for repeat in range(options.repeats):
        for kind, job in jobs.items():
            works = [partial(build, job, root / kind), partial(bare_loop, job)]
            order = (0, 1) if repeat % 2 else (1, 0)
            for which in order:
                times[kind][which].append(seconds(works[which]))
    rows = []
    for kind in kinds:
        built, bare = times[kind]
        purposes = bytes_by_purpose(open_cache(root / kind).store)
        rows.append(
            {
                "kind": kind,
                "anchors_per_second": options.anchors / median(built),
                "rate_against_bare_loop": median([b / a for a, b in zip(built, bare, strict=True)]),
                "seconds": median(built),
                "target_bytes": (purposes["targets"] + purposes["fixed"]) / options.anchors,
                "all_bytes": sum(purposes.values()) / options.anchors,
            }
        )
    return rows


def measure_pass(teacher: Teacher, root: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of one anchor pass, forward and backward, by kind."""
    works: dict[str, Callable[[], object]] = {}
    for kind in KINDS:
        if not (root / kind / "manifest.json").exists():
            continue
        job = job_of(kind, teacher, root, options)
        anchors = open_cache(root / kind).batch(0, options.batch, seed=0)
        cameras = job.datasets[0].dataset.meta.camera_keys
        batch = policy_batch(anchors.raw, cameras, teacher.preprocessor)

        def anchor_pass(job: Job = job, batch: Any = batch, columns: Any = anchors.columns) -> None:
            teacher.policy.zero_grad(set_to_none=True)
            with mode(teacher.policy, train=job.adapter.train_mode):
                drift = student_drift(job.adapter, teacher.policy, batch, columns, job.retained)
                (drift + 1e-3 * drift.detach()).mean().backward()

        works[kind] = anchor_pass
    times: dict[str, list[float]] = {kind: [] for kind in works}
    for _ in range(options.repeats + 1):
        for kind, work in works.items():
            times[kind].append(seconds(work))
    return {kind: median(taken[1:]) for kind, taken in times.items()}


def measure_drawing(policy_type: str, root: Path, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of drawing 64 anchors, and of a training step with 64 samples, of a tiny policy: the hardest case."""
    options = argparse.Namespace(**vars(options) | TINY)
    teacher = make_teacher(policy_type, root, options)
    build(job_of("action", teacher, root, options), root / "drawn")
    loader = open_cache(root / "drawn")
    epoch = -(-len(loader.store) // DRAWN)
    first = [seconds(partial(loader.batch, step, DRAWN, seed=0)) for step in range(epoch)]
    later = [seconds(partial(loader.batch, step, DRAWN, seed=0)) for step in range(epoch, 20 * epoch)]
    dataset = open_dataset("local/old", root / "old", policy_config=teacher.config)
    (raw,) = read_batches([dataset], [(0, np.arange(DRAWN))])
    batch = policy_batch(raw, dataset.meta.camera_keys, teacher.preprocessor)
    optimizer = torch.optim.AdamW(teacher.policy.parameters(), lr=0.0)

    def step() -> None:
        teacher.policy.train()
        teacher.policy.forward(batch)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    steps = [seconds(step) for _ in range(options.repeats + 1)][1:]
    return {
        "parameters": sum(p.numel() for p in teacher.policy.parameters()),
        "first_epoch": median(first),
        "later": median(later),
        "training_step": median(steps),
    }


def measure(policy_type: str, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    teacher = make_teacher(policy_type, root, options)
    rows = measure_building(teacher, root, options)
    passes = measure_pass(teacher, root, options)
    drawing = measure_drawing(policy_type, root, options)
    reference = next((row for row in rows if row["kind"] == TOKEN_LEVEL), None)
    for row in rows:
        row["pass_seconds"] = passes[row["kind"]]
        if reference is not None:
            row["bytes_against_token_level"] = row["target_bytes"] / reference["target_bytes"]
            row["building_speed_against_token_level"] = reference["seconds"] / row["seconds"]
            row["pass_speed_against_token_level"] = passes[TOKEN_LEVEL] / passes[row["kind"]]
    return {
        "policy": policy_type,
        "parameters": sum(p.numel() for p in teacher.policy.parameters()),
        "rows": rows,
        "drawing": drawing | {"share_of_step": drawing["later"] / drawing["training_step"]},
    }


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    print(f"\n{result['policy']}, {result['parameters']:,} parameters, {options.anchors} anchors\n")
    print("| kind | bytes per anchor | built, anchors/s | against bare loop | against token_ce: bytes, build, pass |")
    print("|---|---|---|---|---|")
    for row in result["rows"]:
        ratio = "-"
        if "bytes_against_token_level" in row:
            ratio = (
                f"{row['bytes_against_token_level']:.1f}x larger, "
                f"{row['building_speed_against_token_level']:.2f}x faster, "
                f"{row['pass_speed_against_token_level']:.2f}x faster"
            )
        print(
            f"| {row['kind']} | {row['target_bytes']:,.0f} | {row['anchors_per_second']:.0f} "
            f"| {row['rate_against_bare_loop']:.2f} | {ratio} |"
        )
    drawing = result["drawing"]
    print(
        f"\ndrawing {DRAWN} anchors: {1e3 * drawing['later']:.2f} ms, {100 * drawing['share_of_step']:.2f} % of a "
        f"training step of {drawing['parameters']:,} parameters (first epoch, with PNG decoding: "
        f"{1e3 * drawing['first_epoch']:.1f} ms)"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", default="pi0_fast,smolvla")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--image_size", type=int, default=224)
    parser.add_argument("--anchors", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output_dir", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    results = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        make_local_dataset(root / "old", TASKS, image_size=96)
        for policy_type in options.policies.split(","):
            results.append(measure(policy_type, root, options))
            show(results[-1], options)
            for kind in KINDS:
                shutil.rmtree(root / kind, ignore_errors=True)
    sizes = {name: getattr(options, name) for name in ("width", "depth", "image_size", "anchors", "batch", "repeats")}
    write(dated("anchors", **sizes, results=results), options.output_dir)


if __name__ == "__main__":
    main()
