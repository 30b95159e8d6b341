"""Runs of `craft train` on several ranks, on policies for which one process and several can be compared exactly."""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from tests.warm_process import rank_log

PACKAGE = "tests.distributed.per_sample"
SAMPLES, ANCHORS = 4, 8  # of all ranks together in a step
# Mathematically some weights have no gradient (biases of keys, ...). Adam would turn the rounding there into steps.
SGD = {
    "use_policy_training_preset": "false",
    "optimizer.type": "sgd",
    "optimizer.grad_clip_norm": 1.0,
    "scheduler.type": "diffuser",
    "scheduler.num_warmup_steps": 0,
}
MEASURED = {"update_s", "dataloading_s", "samples_per_s", "retention_s"}  # by a clock


class Run(NamedTuple):
    """What `craft train` left."""

    exit_code: int
    output: Path
    log: Path

    @property
    def metrics(self) -> list[dict]:
        """Logged steps, without what a clock measured."""
        lines = (self.output / "metrics.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in MEASURED} for line in lines]

    @property
    def checkpoint(self) -> Path:
        return self.output / "checkpoints" / "last"

    @property
    def weights(self) -> dict:
        return load_file(self.checkpoint / "pretrained_model" / "model.safetensors")

    def said(self, rank: int = 0) -> str:
        return rank_log(self.log, rank).read_text()


@pytest.fixture(scope="session")
def per_sample(checkpoints, tmp_path_factory):
    """Function from a policy type to a checkpoint of it whose loss is a mean over samples."""
    made: dict[str, Path] = {}

    def checkpoint(policy_type: str) -> Path:
        if policy_type not in made:
            directory = tmp_path_factory.mktemp("per_sample") / policy_type
            shutil.copytree(checkpoints(policy_type), directory)
            config = json.loads((directory / "config.json").read_text())
            config["type"] = f"{policy_type}_per_sample"
            (directory / "config.json").write_text(json.dumps(config))
            made[policy_type] = directory
        return made[policy_type]

    return checkpoint


@pytest.fixture
def flags_of(per_sample, train_flags, anchor_data, tmp_path):
    """Function from a policy type and a number of ranks to the flags of the same run."""

    def flags(policy_type: str, output: Path, ranks: int, **changes: object) -> list[str]:
        settings = {
            "policy.path": per_sample(policy_type),
            "discover_packages_path": PACKAGE,
            "batch_size": SAMPLES // ranks,
            "optimizer.lr": 0.05,
            **SGD,
            "craft.enabled": "true",
            "craft.anchor_batch_size": ANCHORS // ranks,
            "craft.num_anchors": 24,
            "craft.conflict_threshold": 0.0,
            "craft.old_dataset.repo_id": "local/old",
            "craft.old_dataset.root": anchor_data / "old",
            "craft.anchor_cache_dir": tmp_path / f"cache_{output.name}",
            "craft.log_craft_metrics_freq": 1,
            **{name.replace("__", "."): value for name, value in changes.items()},
        }
        return train_flags(policy_type, output, **{name.replace(".", "__"): value for name, value in settings.items()})

    return flags


@pytest.fixture
def train(flags_of, warm_process, tmp_path):
    """Function that trains on so many ranks."""

    def train(policy_type: str, ranks: int, name: str | None = None, env=None, **changes: object) -> Run:
        output = tmp_path / (name or f"{policy_type}_{ranks}")
        log = tmp_path / f"log_{output.name}"
        argv = ["train", *flags_of(policy_type, output, ranks, **changes)]
        return Run(warm_process.run(argv, log, ranks=ranks, variables=env), output, log)

    return train
