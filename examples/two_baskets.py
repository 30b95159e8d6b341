"""Forgetting and its cure, end to end, in under a minute, in a world of two numbers.

A small policy moves a gripper over a table with three baskets and reads an instruction. It can already serve the red
and the blue basket. Then it is fine-tuned to serve the green one, on demonstrations of that alone:

- plainly, after which "put it in the red basket" goes to the green one as well;
- with CRaFT, whose anchors are frames of the NEW task paired with the OLD instructions, and what the policy did with
  them before: not one old frame is needed, because red, blue and green share the scene.

The world is a toy, the training step is not: it is the one that `lerobot_craft.core` gives to any torch module.
"""

import argparse
import copy
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from scipy.stats import binomtest
from torch import Tensor, nn

from lerobot_craft.core import AnchorDrift, Dual, Multipliers, RetentionStep, Surgery, drift, epsilon_schedule

BASKETS = ("red", "blue", "green")
OLD, NEW = BASKETS[:2], BASKETS[2]
VOCABULARY = ("put", "it", "in", "the", "basket", *BASKETS)
SPEED, HORIZON, RADIUS = 0.15, 25, 0.1
EPISODES = 500  # of demonstration per basket


def instruction(basket: str) -> Tensor:
    """Token ids of "put it in the <basket> basket"."""
    return torch.tensor([VOCABULARY.index(w) for w in f"put it in the {basket} basket".split()])


class Policy(nn.Module):
    """(scene, instruction) -> velocity of the gripper."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(len(VOCABULARY), 32)
        self.net = nn.Sequential(
            nn.Linear(8 + 32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, scene: Tensor, tokens: Tensor) -> Tensor:
        """[B, 8] and [B, words] -> [B, 2]."""
        velocity: Tensor = self.net(torch.cat((scene, self.words(tokens).mean(dim=1)), dim=-1))
        return velocity


def new_scenes(count: int) -> Tensor:
    """[B, 8]: the gripper and three baskets, anywhere on the table."""
    return 2 * torch.rand(count, 8) - 1


def expert(scenes: Tensor, basket: str) -> Tensor:
    """[B, 2]: straight to the basket, at bounded speed."""
    i = BASKETS.index(basket)
    return at_most_speed(scenes[:, 2 + 2 * i : 4 + 2 * i] - scenes[:, :2])


def at_most_speed(velocity: Tensor) -> Tensor:
    """[B, 2], no longer than SPEED."""
    slowed: Tensor = velocity * (SPEED / velocity.norm(dim=-1, keepdim=True).clamp_min(SPEED))
    return slowed


def demonstrations(basket: str, episodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every moment of some episodes: the scene, the instruction, and what the expert did."""
    scenes, frames = new_scenes(episodes), []
    for _ in range(HORIZON):
        frames.append(scenes.clone())
        scenes[:, :2] += expert(scenes, basket)
    scenes = torch.cat(frames)
    return scenes, instruction(basket).expand(len(scenes), -1), expert(scenes, basket)


def batch_of(data: tuple[Tensor, Tensor, Tensor], size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random moments."""
    chosen = torch.randint(len(data[0]), (size,))
    scenes, tokens, actions = (x[chosen] for x in data)
    return scenes, tokens, actions


@torch.no_grad()
def success(policy: Policy, basket: str, episodes: int) -> int:
    """Episodes in which the gripper ends over the basket that was asked for."""
    torch.manual_seed(1234)  # the same start states for every policy
    scenes = new_scenes(episodes)
    for _ in range(HORIZON):
        scenes[:, :2] += at_most_speed(policy(scenes, instruction(basket).expand(episodes, -1)))
    i = BASKETS.index(basket)
    return int(((scenes[:, 2 + 2 * i : 4 + 2 * i] - scenes[:, :2]).norm(dim=-1) < RADIUS).sum())


def imitate(policy: Policy, baskets: Sequence[str], steps: int, batch: int, lr: float) -> Policy:
    """Plain training on demonstrations."""
    optimizer = torch.optim.Adam(policy.parameters(), lr=lr)
    demos = [demonstrations(basket, EPISODES) for basket in baskets]
    for step in range(steps):
        scenes, tokens, actions = batch_of(demos[step % len(demos)], batch)
        optimizer.zero_grad()
        drift(policy(scenes, tokens), actions).backward()
        optimizer.step()
    return policy


def finetune_plainly(teacher: Policy, steps: int) -> Policy:
    """Nothing but the new task."""
    return imitate(copy.deepcopy(teacher), [NEW], steps, batch=128, lr=1e-3)


def finetune_with_craft(teacher: Policy, steps: int) -> Policy:
    """The new task, within a budget for each old one."""
    student = copy.deepcopy(teacher)
    demos = demonstrations(NEW, EPISODES)
    step = RetentionStep(
        student.parameters(),
        torch.optim.Adam(student.parameters(), lr=1e-3),
        Multipliers(Dual(lambda_min=1.0, lambda_lr=0.01, lambda_max=10.0, fall_rate=0.1), OLD),
        surgery=Surgery(use_grad_projection=False),  # the multipliers may spend the budget: docs/decisions/0003
        epsilon=partial(epsilon_schedule, total_steps=steps, epsilon_start=2.0, epsilon_end=1.0),
        units=[teacher_error(teacher, basket) for basket in OLD],
    )
    for _ in range(steps):
        scenes, tokens, actions = batch_of(demos, 128)
        groups = torch.arange(len(scenes)) % len(OLD)
        old_tokens = torch.stack([instruction(basket) for basket in OLD])[groups]
        with torch.no_grad():
            target = teacher(scenes, old_tokens)
        step(
            partial(_task_loss, student, scenes, tokens, actions),
            partial(_anchor_drift, student, scenes, old_tokens, target, groups),
        )
    return student


@torch.no_grad()
def teacher_error(teacher: Policy, basket: str) -> float:
    """The unit of the budget: how far the teacher itself is from its demonstrator."""
    scenes, tokens, actions = demonstrations(basket, EPISODES)
    return drift(teacher(scenes, tokens), actions).item()


def _task_loss(policy: Policy, scenes: Tensor, tokens: Tensor, actions: Tensor) -> Tensor:
    return drift(policy(scenes, tokens), actions)


def _anchor_drift(policy: Policy, scenes: Tensor, tokens: Tensor, target: Tensor, groups: Tensor) -> AnchorDrift:
    return AnchorDrift(drift(policy(scenes, tokens), target, reduction="none"), groups)


def with_interval(successes: int, n: int) -> str:
    """A success rate and its 95 % Wilson interval."""
    interval = binomtest(successes, n).proportion_ci(method="wilson")
    return f"{successes / n:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Print the table; return the success rates by method and basket."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one seed, half the steps and episodes")
    options = parser.parse_args(arguments)
    seeds, episodes, pretrain_steps, steps = (1, 100, 1500, 500) if options.small else (3, 200, 3000, 1000)
    torch.set_num_threads(1)  # the policy is too small to share
    started = time.perf_counter()

    methods: dict[str, Callable[[Policy, int], Policy]] = {
        "before fine-tuning": lambda teacher, _: teacher,
        "plain fine-tuning": finetune_plainly,
        "CRaFT, no old frames": finetune_with_craft,
    }
    counts = {name: dict.fromkeys(BASKETS, 0) for name in methods}
    for seed in range(seeds):
        torch.manual_seed(seed)
        teacher = imitate(Policy(), OLD, pretrain_steps, batch=256, lr=2e-3)
        for name, method in methods.items():
            torch.manual_seed(seed)
            student = method(teacher, steps)
            for basket in BASKETS:
                counts[name][basket] += success(student, basket, episodes)

    n = seeds * episodes
    print(f"Success with 95 % Wilson interval; n = {n} episodes per cell ({seeds} seeds), same start states.\n")
    print(f"{'':22}" + "".join(f"{b + (' (new)' if b == NEW else ' (old)'):>20}" for b in BASKETS))
    for name, row in counts.items():
        print(f"{name:22}" + "".join(f"{with_interval(k, n):>20}" for k in row.values()))
    print(f"\n{time.perf_counter() - started:.0f} s. A toy world, and the training step that real policies get.")
    return {name: {b: k / n for b, k in row.items()} for name, row in counts.items()}


if __name__ == "__main__":
    main()
