"""A context as `craft train` makes it, with a small policy, real datasets and a real accelerator."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
from torch import nn

from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.tiny.make import make_local_dataset
from lerobot_craft.training.config import DocumentsConfig
from lerobot_craft.training.methods.method import Context

BATCH_SIZE = 4


@pytest.fixture
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def train_settings(output_dir, **changes):
    settings = {"output_dir": output_dir, "seed": 3, "batch_size": BATCH_SIZE, "rename_map": {}, "dataset": None}
    return SimpleNamespace(**settings | changes)


@pytest.fixture
def module_context(accelerator, tmp_path):
    """Function from a module to a context without data, for methods that need none."""

    def make(policy: nn.Module, *, resumed=False, output_dir=tmp_path, **craft):
        config = DocumentsConfig(enabled=True, **craft)
        return Context(config, train_settings(output_dir), policy, None, "", None, accelerator, resumed)

    return make


@pytest.fixture
def policy_context(accelerator, tmp_path, anchor_data, teachers):
    """Function from a policy type to a context with a copy of its teacher, the new dataset and the old one."""

    def make(policy_type="smolvla", *, peft=None, old="old", new="new", resumed=False, train=(), **craft):
        teacher = teachers(policy_type)
        policy = copy.deepcopy(teacher.policy).train()
        if peft is not None:
            policy = policy.wrap_with_peft(peft_cli_overrides=dataclasses.asdict(peft))
        if old is not None:
            craft["old_dataset"] = flags(anchor_data, *([old] if isinstance(old, str) else old))
        root = anchor_data / new
        data = SimpleNamespace(repo_id=f"local/{root.name}", root=str(root), revision=None, episodes=None)
        settings = train_settings(tmp_path, dataset=data, **dict(train))
        config = DocumentsConfig(enabled=True, **craft)
        return Context(config, settings, policy, teacher, "", None, accelerator, resumed)

    return make


@pytest.fixture(scope="session")
def another_dataset(anchor_data):
    """Function that makes a dataset beside `old` and `new`, once, and returns its name."""

    def make(name, **settings):
        if not (anchor_data / name).exists():
            make_local_dataset(anchor_data / name, ["wave"], **{"image_size": 64, **settings})
        return name

    return make


def flags(directory, *names):
    roots = [directory / name for name in names]
    return DatasetFlags(",".join(f"local/{root.name}" for root in roots), ",".join(map(str, roots)))


@pytest.fixture(autouse=True)
def _open_once(opened_once, monkeypatch):
    monkeypatch.setattr("lerobot_craft.training.methods.demonstrations.open_dataset", opened_once)
