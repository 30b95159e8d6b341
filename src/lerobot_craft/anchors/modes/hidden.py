"""`hidden`: hidden states at layers, pooled to vectors or token by token; docs/method.md, equations (7) to (10)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_args, override

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, ColumnSpec
from lerobot_craft.anchors.retained import (
    PER_TOKEN,
    Compared,
    LayerValues,
    Needed,
    Retained,
    dense,
    layers_asked,
)
from lerobot_craft.core import Pooling, pool_hidden_states
from lerobot_craft.core.pooling import Pooled
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies import Batch, Fixed, Output, PolicyAdapter

_PAIR: Pooling = "vision_mean+text_last"
_ONE, _STACKED, _VALID = "target_features", "teacher_hidden", "target_valid"


@dataclass(frozen=True)
class _HiddenValues(LayerValues):
    pooling: str


@dataclass(frozen=True)
class Hidden(Retained):
    """Hidden states.

    Attributes:
        pooling: How they become vectors; `none` keeps every token.
        requested: The layers as the user wrote them.
    """

    mode: ClassVar[str] = "hidden"
    unit: ClassVar[str] = "the spread of the teacher's hidden states"
    manifest_values: ClassVar[type] = _HiddenValues

    pooling: Pooling = "mean_image_tokens"
    requested: str | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pooling not in get_args(Pooling):
            raise CraftError(f"pooling must be one of {', '.join(get_args(Pooling))}; got {self.pooling!r}")

    @override
    @classmethod
    def asked(cls, flags: Any, adapter: PolicyAdapter, policy: Any) -> Self:
        requested = layers_asked(flags) or "-2"
        default: Pooling = "mean_image_tokens" if flags.layers_to_save is None else _PAIR
        pooling = PER_TOKEN if flags.per_token else flags.pooling or default
        return cls(adapter.resolve(policy, requested), pooling=pooling, requested=requested)

    @override
    @classmethod
    def stored(cls, values: Mapping[str, Any], adapter: PolicyAdapter, policy: Any) -> Self:
        return cls(adapter.resolve(policy, values["layers_to_save"]), pooling=values["pooling"])

    @override
    def values(self) -> dict[str, Any]:
        return super().values() | {
            "layers_requested": self.requested,
            "pooling": self.pooling,
            "pooling_strategy": {"vision": "mean", "text": "last"} if self.pooling == _PAIR else None,
        }

    @override
    @classmethod
    def describe(cls, values: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> str:
        return f"{super().describe(values, columns)}, pooling {values['pooling']}"

    @override
    @classmethod
    def freezes_readout(cls, flags: Any, held: Callable[[], Mapping[str, Any]]) -> bool:
        """Frozen if every token is kept: a loss on hidden states does not constrain the readout."""
        return bool(flags.per_token or held().get("pooling") == PER_TOKEN)

    @override
    def take(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Fixed | None) -> dict[str, Output]:
        found = adapter.hidden(policy, batch, self.layers, fixed)
        if self.pooling == PER_TOKEN:
            return {str(layer): Output(tokens.hidden, tokens.mask) for layer, tokens in found.items()}
        pooled: dict[str, Pooled] = {
            str(layer): pool_hidden_states(tokens.hidden, tokens.mask, self.pooling, tokens.spans)
            for layer, tokens in found.items()
        }
        return {name: Output(*vectors) for name, vectors in pooled.items()}  # [B, D] or [B, 2, D]

    @override
    def columns(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Sequence[Fixed]) -> Columns:
        if self.pooling == PER_TOKEN:
            return super().columns(adapter, policy, batch, fixed)
        pooled = self.take(adapter, policy, batch, fixed[0] if fixed else None).values()
        if len({values.shape[-1] for values, _ in pooled}) > 1:
            raise CraftError(
                "these layers differ in width, so their pooled features cannot be stacked: keep every token"
            )
        features = torch.stack([values for values, _ in pooled], dim=1).cpu()  # [B, layers, (2,) D]
        valid = torch.stack([mask for _, mask in pooled], dim=1).cpu()
        if features.shape[1:-1] == (1,):
            return {_ONE: features[:, 0], _VALID: valid[:, 0]}
        return {_STACKED: features, _VALID: valid}

    @override
    def needed(self, adapter: PolicyAdapter, columns: Mapping[str, Any]) -> Needed:
        if self.pooling == PER_TOKEN:
            return super().needed(adapter, columns)
        if _STACKED in columns or len(self.layers) > 1:
            return {_STACKED: (False, [len(self.layers)])}
        return {_ONE: (False, [])}

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
        if self.pooling == PER_TOKEN:
            return super().compare(adapter, policy, batch, columns, fixed, draw)
        targets = dense(columns[_STACKED]) if _STACKED in columns else dense(columns[_ONE]).unsqueeze(1)
        compared = []
        for position, (name, pooled) in enumerate(self.take(adapter, policy, batch, fixed or None).items()):
            teacher = targets[:, position].to(pooled.values.device)
            if teacher.shape != pooled.values.shape:
                raise CraftError(
                    f"the policy's features at layer {name} have shape {tuple(pooled.values.shape[1:])}, the cache "
                    f"holds {tuple(teacher.shape[1:])}: it was built for another policy or pooling"
                )
            compared.append(Compared(name, pooled.values, teacher, pooled.mask))
        return compared

    @override
    @classmethod
    def can_measure(cls, columns: Columns, layers: Sequence[str]) -> bool:
        if super().can_measure(columns, layers):
            return True
        valid, stacked, single = (columns.get(name) for name in (_VALID, _STACKED, _ONE))
        if not isinstance(valid, Tensor) or valid.dtype != torch.bool:
            return False
        if stacked is not None:
            return isinstance(stacked, Tensor) and stacked.shape[1:2] == valid.shape[1:2] == (len(layers),)
        return isinstance(single, Tensor) and single.shape[:-1] == valid.shape

    @override
    @classmethod
    def vectors(cls, columns: Columns, layers: Sequence[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        if _VALID not in columns:  # every token is kept
            yield from super().vectors(columns, layers)
            return
        valid = dense(columns[_VALID])
        for position, layer in enumerate(layers):
            is_one = _STACKED not in columns
            features = dense(columns[_ONE]) if is_one else dense(columns[_STACKED])[:, position]
            real = valid if is_one else valid[:, position]
            yield layer, features[real], real.nonzero()[:, 0]

    @override
    def disagreements(self, flags: Any, adapter: PolicyAdapter, policy: Any) -> list[str]:
        wanted = super().disagreements(flags, adapter, policy)
        if flags.per_token and self.pooling != PER_TOKEN:
            wanted.append(f"every token ({setting('per_token')})")
        elif flags.pooling not in (None, self.pooling):
            wanted.append(f"pooling {flags.pooling} ({setting('pooling')})")
        return wanted

    @override
    def __str__(self) -> str:
        pooling = "every token" if self.pooling == PER_TOKEN else f"pooling {self.pooling}"
        return f"{super().__str__()}, {pooling}"
