import os

import torch
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.utils.constants import ACTION

from lerobot_craft.tiny.pi import PI0FastTinyPolicy, PI0TinyPolicy, PI05TinyPolicy
from tests.distributed.per_sample.configuration_per_sample import (
    ACTPerSampleConfig,
    DiffusionPerSampleConfig,
    PI0FastPerSampleConfig,
    PI0PerSampleConfig,
    PI05PerSampleConfig,
    SmolVLAPerSampleConfig,
)

DIVERGE = "PER_SAMPLE_DIVERGES"  # RANK:FORWARD, the latter counted from 1


class PerSample:
    """The policy's own loss of each sample alone, under noise that depends on that sample alone."""

    def forward(self, batch):
        self._diverge()
        losses = [self._loss_of(batch, row) for row in range(len(batch[ACTION]))]
        return torch.stack(losses).mean(), {}

    def _diverge(self):
        """At the forward and on the rank that the environment names: one weight, by the last of its bits."""
        if os.environ.get(DIVERGE) is None or not self.training:
            return
        self._forwards = getattr(self, "_forwards", 0) + 1
        if os.environ[DIVERGE] == f"{os.environ['RANK']}:{self._forwards}":
            weight = next(p for p in self.parameters() if p.requires_grad)
            weight.data.view(torch.int32).view(-1)[0] += 1

    def _loss_of(self, batch, row):
        sample = {name: _row(value, row, len(batch[ACTION])) for name, value in batch.items()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(sample[ACTION].double().abs().sum() * 1e6))
            return super().forward(sample)[0]


def _row(value, row, rows):
    if isinstance(value, torch.Tensor | list) and len(value) == rows:
        return value[row : row + 1]
    return value


class ACTPerSamplePolicy(PerSample, ACTPolicy):
    config_class, name = ACTPerSampleConfig, "act_per_sample"


class SmolVLAPerSamplePolicy(PerSample, SmolVLAPolicy):
    config_class, name = SmolVLAPerSampleConfig, "smolvla_per_sample"


class PI0FastPerSamplePolicy(PerSample, PI0FastTinyPolicy):
    config_class, name = PI0FastPerSampleConfig, "pi0_fast_per_sample"


class PI0PerSamplePolicy(PerSample, PI0TinyPolicy):
    config_class, name = PI0PerSampleConfig, "pi0_per_sample"


class PI05PerSamplePolicy(PerSample, PI05TinyPolicy):
    config_class, name = PI05PerSampleConfig, "pi05_per_sample"


class DiffusionPerSamplePolicy(PerSample, DiffusionPolicy):
    config_class, name = DiffusionPerSampleConfig, "diffusion_per_sample"
