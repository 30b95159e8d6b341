"""`action`: the policy's output: actions, velocities, noise, or the distribution of its next token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, override

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, ColumnSpec, Ragged
from lerobot_craft.anchors.retained import (
    OWN_ERROR,
    Compared,
    Needed,
    Retained,
    as_kind,
    at_draw,
    at_valid,
    dense,
    ragged,
)
from lerobot_craft.core import drift, fold_tail, largest_entries, token_cross_entropy
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Batch, Fixed, Output, PolicyAdapter


@dataclass(frozen=True)
class _OutputValues:
    top_k: int
    num_draws: int


@dataclass(frozen=True)
class Action(Retained):
    """The policy's output.

    Attributes:
        top_k: Number of logits kept per position of a token policy; the others are folded into one.
    """

    mode: ClassVar[str] = "action"
    unit: ClassVar[str] = "the teacher's own error"
    has_own_error: ClassVar[bool] = True
    manifest_values: ClassVar[type] = _OutputValues

    top_k: int = 64

    @override
    def __post_init__(self) -> None:
        if self.top_k < 1 or self.draws < 1:
            raise CraftError(f"top_k and num_draws must be at least 1; got {self.top_k} and {self.draws}")

    @override
    @classmethod
    def asked(cls, flags: Any, adapter: PolicyAdapter, policy: Any) -> Self:
        draws = flags.num_draws if adapter.is_drawn else min(flags.num_draws, 1)
        return cls(draws=draws, top_k=flags.top_k)

    @override
    @classmethod
    def stored(cls, values: Mapping[str, Any], adapter: PolicyAdapter, policy: Any) -> Self:
        # Greedy decoding makes all draws equal, so only one is stored.
        return cls(draws=1 if adapter.output_kind == "logits" else values["num_draws"], top_k=values["top_k"])

    @override
    def values(self) -> dict[str, Any]:
        return {"top_k": self.top_k, "num_draws": self.draws}

    @override
    @classmethod
    def problems(cls, values: Any) -> list[str]:
        return [f"values.{name}: {n} is less than 1" for name, n in vars(values).items() if n < 1]

    @override
    @classmethod
    def describe(cls, values: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> str:
        draws = f", {values['num_draws']} draws of each" if values["num_draws"] > 1 else ""
        logits = f", up to {values['top_k']} logits per token" if "kept" in columns else ""
        return f"the policy's output{draws}{logits}"

    @property
    @override
    def needs_fixed(self) -> bool:
        return True

    @override
    def loss_types(self, adapter: PolicyAdapter) -> tuple[str, ...]:
        return ("kl",) if adapter.output_kind == "logits" else super().loss_types(adapter)

    @override
    def take(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Fixed | None) -> dict[str, Output]:
        return {"output": adapter.output(policy, batch, fixed or {})}

    @override
    def columns(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Sequence[Fixed]) -> Columns:
        outputs = adapter.outputs(policy, batch, fixed)
        errors = self._own_errors(adapter, policy, batch, fixed, outputs)
        return errors | self._targets(adapter, fixed, outputs)

    def _targets(self, adapter: PolicyAdapter, fixed: Sequence[Fixed], outputs: Sequence[Output]) -> Columns:
        if adapter.output_kind != "logits":
            return {"target": torch.stack([o.values.float().cpu() for o in outputs], dim=1)}  # [B, draws, steps, D]
        values, mask = outputs[0]
        logits, lengths = values[mask], mask.sum(dim=1).cpu()  # [real positions, V]
        kept = largest_entries(logits, self.top_k)
        return {
            "target": Ragged(fold_tail(logits, kept).cpu(), lengths),
            "kept": Ragged(kept.to(torch.int32).cpu(), lengths),
        }

    def _own_errors(
        self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Sequence[Fixed], outputs: Sequence[Output]
    ) -> Columns:
        """The teacher's own distance from the demonstrator, by loss type: the budget's unit.

        For a demonstrated token, the teacher's divergence is its cross-entropy.
        """
        errors: dict[str, list[Tensor]] = {kind: [] for kind in self.loss_types(adapter)}
        for draw, own in zip(fixed, outputs, strict=True):
            shown = adapter.demonstration(policy, batch, draw)
            output = own if shown.fixed is draw else adapter.output(policy, batch, shown.fixed)
            for kind, found in errors.items():
                if adapter.output_kind == "logits":
                    error = token_cross_entropy(output.values, shown.values, mask=shown.mask, reduction="none")
                else:
                    error = drift(output.values, shown.values, as_kind(kind), mask=shown.mask, reduction="none")
                found.append(error)
        return {f"{OWN_ERROR}{kind}": torch.stack(found).mean(dim=0).cpu() for kind, found in errors.items()}

    @override
    def needed(self, adapter: PolicyAdapter, columns: Mapping[str, Any]) -> Needed:
        if adapter.output_kind == "logits":
            return {"target": (True, []), "kept": (True, [])}
        return {"target": (False, [self.draws])}

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
        values, mask = self.take(adapter, policy, batch, fixed)["output"]
        target = columns["target"]
        if isinstance(target, Ragged):
            kept = at_valid(ragged(columns, "kept"), mask).long()
            return [Compared("output", fold_tail(values, kept), at_valid(target, mask), mask)]
        teacher = at_draw(dense(target), draw).to(values.device)
        if teacher.shape != values.shape:
            raise CraftError(
                f"the policy puts out {tuple(values.shape[1:])} per anchor, the cache holds "
                f"{tuple(teacher.shape[1:])}: chunk size or action dimensions changed since it was built"
            )
        return [Compared("output", values, teacher, mask)]

    @override
    def deviation(self, drifts: Tensor, columns: Mapping[str, Column], adapter: PolicyAdapter) -> Tensor:
        if adapter.output_kind == "logits":  # a divergence is already relative
            return drifts
        return super().deviation(drifts, columns, adapter)

    @override
    def token_columns(self, length: int) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        return {
            "target": (length - 1, torch.float32, (self.top_k + 1,)),
            "kept": (length - 1, torch.int32, (self.top_k,)),
        }

    @override
    def disagreements(self, flags: Any, adapter: PolicyAdapter, policy: Any) -> list[str]:
        return []

    @override
    def __str__(self) -> str:
        return "the policy's output"
