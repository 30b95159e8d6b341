"""Contexts as `craft train` makes them, without its loop: a student that is still its teacher, and real settings."""

import copy
import dataclasses
from pathlib import Path

from lerobot_craft.anchors.recipe import DatasetFlags

OPEN_DATASET = "lerobot_craft.anchors.build.open_dataset"
LORA = ".*(language_model|text_model).*self_attn\\.(q|v)_proj"


def old_dataset(anchor_data: Path) -> DatasetFlags:
    return DatasetFlags("local/old", str(anchor_data / "old"))


def make_context(teacher, anchor_data, /, *, lora=None, resumed=False, **craft):
    """A context around a copy of the teacher, so that a test may change it."""
    import torch
    from accelerate import Accelerator
    from lerobot.configs.default import DatasetConfig, PeftConfig
    from lerobot.configs.train import TrainPipelineConfig

    from lerobot_craft.training.config import DocumentsConfig
    from lerobot_craft.training.methods.method import Context

    student = copy.deepcopy(teacher.policy).train()
    teacher = dataclasses.replace(teacher, policy=student)
    policy = student
    if lora is not None:
        policy = student.wrap_with_peft(peft_cli_overrides=dataclasses.asdict(PeftConfig(target_modules=lora, r=4)))
    train = TrainPipelineConfig(
        dataset=DatasetConfig("local/new", root=str(anchor_data / "new")), policy=teacher.config, seed=7
    )
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad])
    config = DocumentsConfig(enabled=True, **{"num_anchors": 18, **craft})
    path = str(teacher.config.pretrained_path)
    return Context(config, train, policy, teacher, path, optimizer, Accelerator(cpu=True), resumed)


def resume(context, **craft):
    """The context of the same run after a restart."""
    return dataclasses.replace(context, resumed=True, config=dataclasses.replace(context.config, **craft))


def train_a_little(context, scale=1.02):
    """Move every trained parameter."""
    import torch

    with torch.no_grad():
        for parameter in context.trained:
            parameter.mul_(scale).add_(0.01)
