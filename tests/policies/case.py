"""What `test_invariants.py` must be told about a policy. docs/adding-a-policy.md shows one made elsewhere."""

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lerobot_craft.policies import Batch, Fixed, Layer, PolicyAdapter, adapter_for, mode

# package.module:NAME of a sequence of cases, or of a function that returns one, to be run instead of ours
ELSEWHERE = "CRAFT_POLICY_CASES"


@dataclass(frozen=True)
class PolicyCase:
    """One small policy of a type, and what its own code says about it."""

    name: str
    build: Callable[..., tuple[nn.Module, Callable[[Any], Batch]]]
    """(empty directory, **config overrides) -> the policy and its preprocessor."""
    raw_batch: Callable[[], dict[str, Any]]
    """Three rows as the data loader gives them, with prompts of different lengths where the policy reads one."""
    full_pass: Callable[[Any, Batch], dict[Layer, Tensor]]
    """The policy's own pass -> hidden states [B, T, D] of the backbone's layers, caught without the adapter's taps."""
    training_loss: Callable[[Any, Batch], tuple[Tensor, Fixed]]
    """The policy's own loss on a batch, and the draw at which it was computed."""
    bfloat16: Mapping[str, Any] = field(default_factory=dict)
    """Config overrides of a policy that trains in bfloat16; autocast is added."""
    tokens_outside_spans: int = 0
    """Real tokens of a row that are neither image, language, state nor action."""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Subject:
    """A policy under test, with a batch of it."""

    case: PolicyCase
    policy: Any
    preprocess: Callable[[Any], Batch]
    adapter: PolicyAdapter
    batch: Batch

    @contextmanager
    def anchor_mode(self, policy: Any = None) -> Iterator[None]:
        with mode(self.policy if policy is None else policy, train=self.adapter.train_mode):
            yield

    def draw(self, seed: int = 0) -> Fixed:
        with self.anchor_mode():
            return self.adapter.fix(self.policy, self.batch, rngs(len(self), seed))[0]

    def layers(self) -> tuple[Layer, ...]:
        """Every layer of every stack."""
        return self.adapter.resolve(self.policy, [f"{stack}:all" for stack in self.adapter.stacks(self.policy)])

    def backbone(self) -> tuple[Layer, ...]:
        return self.adapter.resolve(self.policy, "all")

    def preprocessed(self, rows: Sequence[int]) -> Batch:
        """These rows of the raw batch through the preprocessor, without the others."""
        raw = self.case.raw_batch()
        return self.preprocess({key: pick_rows(value, rows) for key, value in raw.items()})

    def __len__(self) -> int:
        return len(next(value for value in self.case.raw_batch().values()))


def make_subject(case: PolicyCase, directory: Path, **overrides: Any) -> Subject:
    policy, preprocess = case.build(directory, **overrides)
    perturb(policy)
    return Subject(case, policy, preprocess, adapter_for(policy.config), preprocess(case.raw_batch()))


def perturb(policy: nn.Module) -> None:
    """Small noise on every parameter, so that what is initialised to zero (gates, biases) carries gradient too."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def rngs(count: int, seed: int = 0) -> list[np.random.Generator]:
    return [np.random.default_rng((seed, row)) for row in range(count)]


def pick_rows(value: Any, rows: Sequence[int]) -> Any:
    return value[list(rows)] if isinstance(value, Tensor) else [value[row] for row in rows]


def cases() -> Sequence[PolicyCase]:
    """Ours, or those that the environment names."""
    module, _, name = os.environ.get(ELSEWHERE, "tests.policies.lerobot_cases:CASES").partition(":")
    found = getattr(importlib.import_module(module), name)
    made: Sequence[PolicyCase] = found() if callable(found) else found
    return made
