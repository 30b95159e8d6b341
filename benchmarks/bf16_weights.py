"""What becomes of small updates in bfloat16 weights, and what float32 copies or stochastic rounding make of it.

Plain fine-tuning of a tiny pi0_fast (lerobot's own, all sizes reduced) on the same batches in four ways, with AdamW at
the learning rate of lerobot's preset. Prints a table; `make bench-bf16` writes it down.
"""

import argparse
import copy
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import Tensor, nn

from lerobot_craft.core.master_weights import MasterWeights
from lerobot_craft.lerobot_api.datasets import open_dataset
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.teacher.load import load_teacher
from lerobot_craft.tiny.checkpoints import make_checkpoint
from lerobot_craft.tiny.datasets import make_local_dataset

LEARNING_RATE = 2.5e-5
BATCH_SIZE = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    steps, seeds = (value := parser.parse_args()).steps, value.seeds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        policy, batches = prepare(Path(directory))
    print(
        f"pi0_fast, {sum(p.numel() for p in policy.parameters()):,} parameters, AdamW, lr {LEARNING_RATE:g}, "
        f"{steps} steps of {BATCH_SIZE} samples, {seeds} orders of the batches\n"
    )
    print("| weights | moved per step | ever moved | loss of the last 20 steps | of them lost against float32 |")
    print("|---|---|---|---|---|")
    start: float | None = None
    float32: float | None = None
    for name, way in WAYS.items():
        runs = [way(policy, batches, steps, seed) for seed in range(seeds)]
        moved, ever, first, last = (sum(values) / seeds for values in zip(*runs, strict=True))
        start = first if start is None else start
        float32 = last if float32 is None else float32
        behind = (last - float32) / (start - float32)
        print(f"| {name} | {moved:.1%} | {ever:.1%} | {last:.4f} | {behind:.1%} |")
    print(f"\nLoss of the first step: {start:.4f}.")


def prepare(directory: Path) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A policy and what it sees of the batches of a small dataset."""
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.utils.feature_utils import dataset_to_policy_features

    make_local_dataset(directory / "data", ["push the cube"], image_size=64)
    meta = LeRobotDataset("local/data", root=directory / "data").meta
    features = dataset_to_policy_features(meta.features)
    checkpoint = make_checkpoint(
        "pi0_fast",
        directory / "policy",
        output_features={"action": features.pop("action")},
        input_features=features,
        dataset_stats=meta.stats,
        instructions=["push the cube"],
    )
    teacher = load_teacher(checkpoint, ("--device=cpu",))
    dataset = open_dataset("local/data", str(directory / "data"), policy_config=teacher.config)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, drop_last=True)
    return teacher.policy, [policy_batch(raw, meta.camera_keys, teacher.preprocessor) for raw in loader]


Measured = tuple[float, float, float, float]  # share that moves in a step, share that ever moved, first and last losses
Step = Callable[[torch.optim.Optimizer, list[nn.Parameter]], None]


def run(dtype: torch.dtype, make_step: Callable[..., Step]) -> Callable[..., Measured]:
    def way(policy: nn.Module, batches: list[dict[str, Any]], steps: int, seed: int) -> Measured:
        torch.manual_seed(seed)
        student = copy.deepcopy(policy).train().to(dtype)
        named = dict(student.named_parameters())
        parameters = list(named.values())
        optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
        step = make_step(optimizer, named)
        start = [p.detach().clone() for p in parameters]
        shares, losses = [], []
        for number in range(steps):
            batch = batches[int(torch.randint(len(batches), ()))]
            loss = student(dict(batch))[0]
            loss.backward()
            before = [p.detach().clone() for p in parameters]
            step(optimizer, parameters)
            optimizer.zero_grad()
            student.zero_grad()
            losses.append(loss.item())
            if number % 10 == 0:
                shares.append(moved(parameters, before))
        return sum(shares) / len(shares), moved(parameters, start), losses[0], sum(losses[-20:]) / 20

    return way


def moved(parameters: list[nn.Parameter], before: list[Tensor]) -> float:
    changed = sum(int((p != b).sum()) for p, b in zip(parameters, before, strict=True))
    return changed / sum(p.numel() for p in parameters)


def plainly(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Step:
    return lambda optimizer, parameters: optimizer.step()


def with_copies(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Step:
    MasterWeights(optimizer, named.items())
    return lambda optimizer, parameters: optimizer.step()


def stochastically(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter]) -> Step:
    """The same float32 arithmetic of Adam, but no copy stays: each step's result is rounded up or down at random."""
    generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
        for p, copied in zip(parameters, copies, strict=True):
            copied.copy_(p)
            copied.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        for p, copied in zip(parameters, copies, strict=True):
            bits = copied.view(torch.int32) + torch.randint(0, 2**16, p.shape, dtype=torch.int32, generator=generator)
            p.copy_((bits & -(2**16)).view(torch.float32))

    copies = [nn.Parameter(p.detach().float()) for p in named.values()]
    optimizer.param_groups[0]["params"] = copies
    return step


WAYS = {
    "float32": run(torch.float32, plainly),
    "bfloat16": run(torch.bfloat16, plainly),
    "bfloat16, float32 copies": run(torch.bfloat16, with_copies),
    "bfloat16, stochastic rounding": run(torch.bfloat16, stochastically),
}

if __name__ == "__main__":
    main()
