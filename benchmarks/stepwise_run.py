"""A run of `craft train`, opened from flags as the command does, that takes as many steps as it is told to."""

import argparse
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from lerobot_craft.anchors.loader import AnchorLoader, open_cache, retained_of
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.anchors.verify import bytes_by_purpose
from lerobot_craft.cli.flags import parse_flags
from lerobot_craft.cli.train import split_flags
from lerobot_craft.core import RetentionStep
from lerobot_craft.lerobot_api.train_parts import make_accelerator
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.training.anchor_batches import policy_inputs
from lerobot_craft.training.config import config_class
from lerobot_craft.training.loop import run_steps
from lerobot_craft.training.methods import constrained
from lerobot_craft.training.recorder import Recorder
from lerobot_craft.training.run_settings import read_settings
from lerobot_craft.training.session import Session, open_session


@dataclass(frozen=True)
class Variant:
    """One way to train: its flags behind `--craft.`, its anchors' directory, K, lerobot's flags, and who merges."""

    name: str
    craft: dict[str, object]
    cache: str | None = None
    k: int = 1
    other: dict[str, object] = field(default_factory=dict)
    engine: type[RetentionStep] = RetentionStep


class Run:
    """A run of `craft train` that stops where it is told to."""

    def __init__(self, variant: Variant, output_dir: Path, root: Path, options: argparse.Namespace) -> None:
        self.k = variant.k
        self.cache = None if variant.cache is None else root / "anchors" / variant.cache
        with patch.object(constrained, "RetentionStep", variant.engine):
            self._session = self._open(variant, output_dir, root, options)
        self._recorder = Recorder(self._session)

    def _open(self, variant: Variant, output_dir: Path, root: Path, options: argparse.Namespace) -> Session:
        flags: dict[str, object] = {
            "policy.path": root / "pi0_fast",
            "policy.optimizer_lr": options.lr,
            "policy.scheduler_warmup_steps": 0,
            "dataset.repo_id": "local/new",
            "dataset.root": root / "new",
            "output_dir": output_dir,
            "steps": 1000,
            "batch_size": options.batch,
            "num_workers": 0,
            "save_checkpoint": "false",
            "seed": 7,
            **variant.other,
            "craft.enabled": "true",
            "craft.retention_freq": variant.k,
            "craft.anchor_batch_size": options.batch,
            "craft.old_dataset.repo_id": "local/old",
            "craft.old_dataset.root": root / "old",
            "craft.num_anchors": options.anchors,
            "craft.probe_anchors": 0,
            **{f"craft.{name}": value for name, value in variant.craft.items()},
        }
        if self.cache is not None:
            flags["craft.anchor_cache_dir"] = self.cache
        craft_flags, rest = split_flags([f"--{name}={value}" for name, value in flags.items()])
        settings = config_class(craft_flags)
        cfg, craft = read_settings(rest, lambda saved: parse_flags(settings, craft_flags, "craft train", saved))
        output_dir.mkdir(parents=True)
        return open_session(cfg, craft, make_accelerator(cfg))

    @property
    def policy(self) -> Any:
        """What is trained."""
        return unwrapped(self._session.student)

    def take(self, steps: int) -> float:
        """Take steps; seconds per step."""
        self._session.cfg.steps = self._session.step + steps  # where the loop ends; schedules have read it before
        began = time.perf_counter()
        run_steps(self._session, self._recorder)
        return (time.perf_counter() - began) / steps

    def peak_bytes(self) -> int:
        """The most that K steps hold beyond what was held before them."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.take(self.k)
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    def operations(self) -> float:
        """Floating-point operations of a step, the mean over K."""
        with FlopCounterMode(display=False) as counter:
            self.take(self.k)
        return float(counter.get_total_flops() / self.k)

    def anchor_data_seconds(self, batches: int) -> float:
        """Drawing one batch of anchors, reading it and preparing it for the policy; the mean over some."""
        method: Any = self._session.method
        began = time.perf_counter()
        for number in range(batches):
            policy_inputs(method.batch(number).raw, self._session.processors[0])
        return (time.perf_counter() - began) / batches

    def outcome(self, anchors: AnchorLoader) -> dict[str, Any]:
        """What was retained after the steps so far, and what is held in memory for it."""
        costs = {cost.what: cost.bytes for cost in self._session.method.costs()}
        found = {
            "steps": self._session.step,
            "retention_loss": self._session.method.metrics().get("retention_loss"),
            "action_drift": self._action_drift(anchors),
            "retention_gradient_bytes": costs.pop("retention gradient", 0),
            "held_bytes": costs,
        }
        if self.cache is not None:
            store = open_cache(self.cache).store
            purposes = bytes_by_purpose(store)
            found["cache_bytes_per_anchor"] = (purposes["targets"] + purposes["fixed"]) / len(store)
        return found

    def _action_drift(self, anchors: AnchorLoader) -> float:
        """Mean over all anchors of a cache of actions, whatever this run retains."""
        adapter, policy = adapter_for(self._session.cfg.policy), self.policy
        batch = anchors.take(torch.arange(len(anchors.store)))
        inputs = policy_inputs(batch.raw, self._session.processors[0])
        with torch.no_grad(), mode(policy, train=adapter.train_mode):
            retained = retained_of(anchors.manifest, adapter, policy)
            return student_drift(adapter, policy, inputs, batch.columns, retained).mean().item()
