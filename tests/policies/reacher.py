"""A policy that lerobot and CRaFT have never heard of: docs/adding-a-policy.md adds it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from lerobot.configs import PreTrainedConfig
from lerobot.optim import AdamWConfig
from lerobot.policies import PreTrainedPolicy
from torch import nn


@PreTrainedConfig.register_subclass("reacher")
@dataclass
class ReacherConfig(PreTrainedConfig):
    width: int = 16
    chunk_size: int = 4

    observation_delta_indices = None
    reward_delta_indices = None

    @property
    def action_delta_indices(self):
        return list(range(self.chunk_size))

    def get_optimizer_preset(self):
        return AdamWConfig()

    def get_scheduler_preset(self):
        return None

    def validate_features(self):
        pass


class Block(nn.Module):
    # Not torch's encoder layer: in eval mode it has another kernel without gradients than with them, and so a drift.
    def __init__(self, width):
        super().__init__()
        self.own, self.shared = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        return tokens + self.dropout(torch.tanh(self.own(tokens) + self.shared(tokens.mean(dim=1, keepdim=True))))


class ReacherPolicy(PreTrainedPolicy):
    """Patches of one camera and a state token through three blocks to a chunk of two-dimensional actions."""

    config_class = ReacherConfig
    name = "reacher"

    def __init__(self, config):
        super().__init__(config)
        self.patches = nn.Conv2d(3, config.width, kernel_size=8, stride=8)
        self.state_proj = nn.Linear(3, config.width)
        self.blocks = nn.ModuleList(Block(config.width) for _ in range(3))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.chunk_size * 2)

    def predict(self, batch):
        image = self.patches(batch["observation.images.top"]).flatten(2).transpose(1, 2)  # [B, patches, D]
        tokens = torch.cat([image, self.state_proj(batch["observation.state"])[:, None]], dim=1)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(dim=1)).unflatten(1, (self.config.chunk_size, 2))

    def forward(self, batch):
        return F.l1_loss(self.predict(batch), batch["action"]), None

    @torch.no_grad()
    def predict_action_chunk(self, batch, **kwargs):
        self.eval()
        return self.predict(batch)

    def select_action(self, batch, **kwargs):
        return self.predict_action_chunk(batch)[:, 0]

    def get_optim_params(self):
        return self.parameters()

    def reset(self):
        pass
