"""`token_ce`: the student's cross-entropy on the teacher's own tokens; docs/method.md, equation (6)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, override

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, ColumnSpec
from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.anchors.retained import Compared, Needed, dense
from lerobot_craft.core import token_cross_entropy
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies import Batch, Fixed, Output, PolicyAdapter


@dataclass(frozen=True)
class TokenCE(Action):
    """The policy's output. The cache stores only its tokens and the minimum cross-entropy: the teacher's own."""

    mode: ClassVar[str] = "token_ce"

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws > 1:
            raise CraftError(f"num_draws is for {setting('retention_mode')}=action; other values are not drawn")

    @override
    @classmethod
    def asked(cls, flags: Any, adapter: PolicyAdapter, policy: Any) -> Self:
        if adapter.output_kind != "logits":
            adapter.token_labels({})  # raises, and says what to use instead
        return super().asked(flags, adapter, policy)

    @override
    @classmethod
    def describe(cls, values: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> str:
        return "the teacher's tokens"

    @override
    def loss_types(self, adapter: PolicyAdapter) -> tuple[str, ...]:
        return (self.mode,)

    @override
    def _targets(self, adapter: PolicyAdapter, fixed: Sequence[Fixed], outputs: Sequence[Output]) -> Columns:
        labels, mask = adapter.token_labels(fixed[0])
        return {"teacher_ce": token_cross_entropy(outputs[0].values, labels, mask=mask, reduction="none").cpu()}

    @override
    def needed(self, adapter: PolicyAdapter, columns: Mapping[str, Any]) -> Needed:
        return {"teacher_ce": (False, [])}

    @override
    def compare(
        self,
        adapter: PolicyAdapter,
        policy: Any,
        batch: Batch,
        columns: Mapping[str, Column],
        fixed: Fixed,
        draw: int | Tensor = 0,
    ) -> list[Compared]:
        labels, mask = adapter.token_labels(fixed)
        return [Compared("output", self.take(adapter, policy, batch, fixed)["output"].values, labels, mask)]

    @override
    def distance(self, compared: Compared, loss_type: str, scale: float | None = None) -> Tensor:
        """The cross-entropy itself."""
        return token_cross_entropy(compared.student, compared.teacher, mask=compared.mask, reduction="none")

    @override
    def deviation(self, drifts: Tensor, columns: Mapping[str, Column], adapter: PolicyAdapter) -> Tensor:
        cached = dense(columns["teacher_ce"])
        return (drifts - cached).square() / cached.square().clamp_min(1e-6)

    @override
    def token_columns(self, length: int) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        return {}
