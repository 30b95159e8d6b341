"""What becomes of small updates in bfloat16 weights, and what float32 copies or stochastic rounding make of it.

Plain fine-tuning of a tiny pi0_fast (lerobot's own, all sizes reduced) on the same batches in four ways, with AdamW at
the learning rate of lerobot's preset. `make bench-bf16` prints the table.
"""

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from torch import Tensor, nn

from lerobot_craft.anchors.teacher import Teacher, load_teacher
from lerobot_craft.core.parameters import MasterWeights
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.lerobot_api.pretrained import autocast
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.tiny.make import make_checkpoint, make_local_dataset

LEARNING_RATE = 2.5e-5
BATCH_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, data = prepare(Path(directory))
        policies = {dtype: load_teacher(checkpoint, (f"--dtype={dtype}",)) for dtype in ("float32", "bfloat16")}
        dataset = open_dataset("local/data", str(data), policy_config=policies["float32"].config)
        loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, drop_last=True)
        teacher = policies["float32"]
        batches = [policy_batch(raw, dataset.meta.camera_keys, teacher.preprocessor) for raw in loader]
    trained = list(policies["bfloat16"].policy.parameters())
    rounded = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    print(
        f"lerobot's pi0_fast at {sum(p.numel() for p in trained):,} parameters, {rounded:,} of them in bfloat16; AdamW "
        f"at {LEARNING_RATE:g}, {options.steps} steps of {BATCH_SIZE} samples, {options.seeds} orders of batches.\n"
    )
    print("| weights | move in a step | moved at the end | first loss | mean of the last 20 | of float32's descent |")
    print("|---|---|---|---|---|---|")
    descent: float | None = None
    for name, (dtype, make_step) in WAYS.items():
        runs = [run(policies[dtype], make_step, batches, options.steps, seed) for seed in range(options.seeds)]
        moves, moved_at_end, first, last = (sum(values) / options.seeds for values in zip(*runs, strict=True))
        descent = first - last if descent is None else descent
        share = (first - last) / descent
        print(f"| {name} | {moves:.1%} | {moved_at_end:.1%} | {first:.4f} | {last:.4f} | {share:.1%} |", flush=True)


def prepare(directory: Path) -> tuple[Path, Path]:
    """Directories of a policy and of its data."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    data = directory / "data"
    make_local_dataset(data, ["push the cube"], image_size=64)
    dataset = LeRobotDataset("local/data", root=data)
    features = dataset_to_policy_features(dataset.meta.features)
    actions = np.stack([dataset.hf_dataset[i]["action"] for i in range(len(dataset))])
    checkpoint = make_checkpoint(
        "pi0_fast",
        directory / "policy",
        output_features={"action": features.pop("action")},
        input_features=features,
        dataset_stats=dataset.meta.stats,
        instructions=["push the cube"],
        action_chunks=np.lib.stride_tricks.sliding_window_view(actions, 8, axis=0).transpose(0, 2, 1).copy(),
    )
    return checkpoint, data


Measured = tuple[
    float, float, float, float
]  # shares that move in a step and have moved at the end, first and last loss
Step = Callable[[], None]
MakeStep = Callable[[torch.optim.Optimizer, dict[str, nn.Parameter]], Step]


def run(teacher: Teacher, make_step: MakeStep, batches: list[Any], steps: int, seed: int) -> Measured:
    torch.manual_seed(seed)
    student = copy.deepcopy(teacher.policy).train()
    named = dict(student.named_parameters())
    optimizer = torch.optim.AdamW(named.values(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    step = make_step(optimizer, named)
    watched = [p for p in named.values() if p.dtype == torch.bfloat16] or list(named.values())
    start = [p.detach().clone() for p in watched]
    shares, losses = [], []
    for _ in range(steps):
        batch = batches[int(torch.randint(len(batches), ()))]
        with autocast(teacher.config):
            loss = student(dict(batch))[0]
        loss.backward()
        before = [p.detach().clone() for p in watched]
        step()
        student.zero_grad()
        losses.append(loss.item())
        shares.append(moved(watched, before))
    return sum(shares) / steps, moved(watched, start), losses[0], sum(losses[-20:]) / 20


def moved(parameters: list[nn.Parameter], before: list[Tensor]) -> float:
    changed = sum(int((p != b).sum()) for p, b in zip(parameters, before, strict=True))
    return changed / sum(p.numel() for p in parameters)


def plainly(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Step:
    def step() -> None:
        optimizer.step()

    return step


def with_copies(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Step:
    MasterWeights(optimizer, named.items())
    return plainly(optimizer, named)


def stochastically(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Step:
    """The same float32 arithmetic of Adam, but no copy stays: each step's result is rounded up or down at random."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(p, nn.Parameter(p.detach().float())) for p in named.values()]
    optimizer.param_groups[0]["params"] = [copied for _, copied in pairs]

    @torch.no_grad()
    def step() -> None:
        for p, copied in pairs:
            copied.copy_(p)
            copied.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, copied in pairs:
            if p.dtype == torch.float32:
                p.copy_(copied)
                continue
            bits = copied.view(torch.int32) + torch.randint(0, 2**16, p.shape, dtype=torch.int32, generator=generator)
            p.copy_((bits & -(2**16)).view(torch.float32))

    return step


WAYS: dict[str, tuple[str, MakeStep]] = {
    "float32": ("float32", plainly),
    "bfloat16": ("bfloat16", plainly),
    "bfloat16, float32 copies": ("bfloat16", with_copies),
    "bfloat16, stochastic rounding": ("bfloat16", stochastically),
}

if __name__ == "__main__":
    main()
