"""The defaults that the documents of the first CRaFT give to training; who speaks of hidden states has them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lerobot_craft.anchors.documents import DocumentsBuild, asks_for_documents
from lerobot_craft.training.config import CraftConfig


@dataclass
class DocumentsConfig(CraftConfig):
    """Hidden states are retained at every fifth step, on 16 anchors, with multipliers that may fall to 0."""

    anchor_batch_size: int = 16
    retention_freq: int = 5
    retention_mode: str = DocumentsBuild.retention_mode
    anchor_source: str = DocumentsBuild.anchor_source
    num_anchors: int | None = DocumentsBuild.num_samples
    walked_states: float = DocumentsBuild.walked_states
    drawn_states: float = DocumentsBuild.drawn_states
    num_draws: int | None = DocumentsBuild.num_draws
    dual_rule: str | None = "ascent"
    initial_lambda: float = 1.0
    lambda_lr: float | None = 0.01
    lambda_min: float | None = 0.0
    epsilon_start: float | None = 1.0
    epsilon_end: float | None = 0.1


def config_class(flags: Sequence[str]) -> type[CraftConfig]:
    """Whose defaults hold beside some flags of CRaFT, written `--x=y`."""
    return DocumentsConfig if asks_for_documents(flags) else CraftConfig
