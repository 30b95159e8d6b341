"""What is retained of a policy: the contract of a retention mode. One file per mode, in `modes/` or in any package.

A mode is a subclass of `Retained`, with its settings as fields. It must define what it takes from the policy (`take`).
Everything else has a default that fits values at layers: the distance (`distance`), what a cache stores (`columns`),
the flags it reads (`asked`), its description (`describe`). docs/adding-a-retention-mode.md is a walkthrough.

| values | columns of a cache |
|---|---|
| any mode, by default | `<mode>.<layer>` [real positions, D], ragged |
| hidden, pooled, one layer | `target_features` [D] |
| hidden, pooled, several layers or poolings | `teacher_hidden` [layers, D] or [layers, 2, D] |
| action, continuous | `target` [draws, steps, D] |
| action, logits | `target` [real positions, k + 1] and `kept` [real positions, k], ragged |
| token_ce | `teacher_ce`; the labels are the fixed tokens |

Modes that need it also have `fixed.<name>`: noise, time or tokens of the teacher's values. Actions and tokens also have
`own_error.<loss>`: the teacher's distance from the demonstrator or, without one, from its own actions.

A mode is found by its name. Third parties add modes without changing this package, as with adapters.
An installed distribution declares an entry point, which every process finds. A script or notebook registers its mode
for its own process; `craft` imports the registering module if `--discover_packages_path` names it.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from lerobot_craft.anchors.columns import Column, Columns, ColumnSpec, Ragged
from lerobot_craft.core import DriftKind, Pooling, drift
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies import Batch, Fixed, Layer, Output, PolicyAdapter
from lerobot_craft.policies.adapter import installed

PER_TOKEN: Pooling = "none"  # noqa: S105  # not a password: a pooling that keeps tokens
FIXED = "fixed."
OWN_ERROR = "own_error."
_LARGEST_DRIFT = torch.finfo(torch.float32).max
Needed = dict[str, tuple[bool, list[int]]]  # per column: is it ragged, and how its shape begins


class Compared(NamedTuple):
    """Student and teacher values, at one layer or at the output."""

    name: str
    student: Tensor  # [B, ..., D]
    teacher: Tensor
    mask: Tensor | None  # [B, ...]


@dataclass(frozen=True)
class LayerValues:
    """The entries of a manifest's `values` that are read if values at layers are kept; other entries are for people."""

    layers_to_save: list[str]
    layer_scales: dict[str, dict[str, float]]


@dataclass(frozen=True)
class Retained(ABC):
    """Which of the policy's values are retained: a mode with its settings.

    Attributes:
        layers: Where values are read; empty for a mode that retains the policy's output.
        draws: Number of (noise, time) draws per anchor, if the values depend on them.
    """

    mode: ClassVar[str]
    """Its name: for --retention_mode, in manifests, in logs. It also begins the names of its columns."""
    unit: ClassVar[str] = "the spread of the teacher's values"
    """What a drift of 1 is, in words: the spread of the values themselves, unless `has_own_error`."""
    has_own_error: ClassVar[bool] = False
    """Whether its columns have `own_error.<loss>`, which then is the unit of the budget."""
    manifest_values: ClassVar[type] = LayerValues
    """A dataclass of what a manifest must say of it: fields of `values`, read strictly."""

    layers: tuple[Layer, ...] = ()
    draws: int = 1

    def __post_init__(self) -> None:
        if not self.has_own_error and not self.layers:
            raise CraftError(f"{self.mode} retention needs layers")

    @classmethod
    def asked(cls, flags: Any, adapter: PolicyAdapter, policy: Any) -> Self:
        """From flags; `flags` has the fields of `AnchorConfig`."""
        return cls(adapter.resolve(policy, layers_asked(flags) or "-2"))

    @classmethod
    def stored(cls, values: Mapping[str, Any], adapter: PolicyAdapter, policy: Any) -> Self:
        """From a manifest's `values`, already checked by `problems`."""
        return cls(adapter.resolve(policy, values["layers_to_save"]))

    def values(self) -> dict[str, Any]:
        """The settings for a manifest, as JSON; `stored` reads them."""
        return {"layers_to_save": [str(layer) for layer in self.layers]}

    @classmethod
    def problems(cls, values: Any) -> list[str]:
        """Contradictions in a manifest's `values`, decoded as `manifest_values`; each begins with the field."""
        if not values.layers_to_save or set(values.layers_to_save) != set(values.layer_scales):
            return ["values.layers_to_save: expected one or more layers, the same as in values.layer_scales"]
        return [
            problem
            for layer, scales in values.layer_scales.items()
            for problem in scale_problems(f"values.layer_scales.{layer}", scales)
        ]

    @classmethod
    def describe(cls, values: Mapping[str, Any], columns: Mapping[str, ColumnSpec]) -> str:
        """Describe a cache for a person, from the manifest's `values` and `columns`."""
        return f"layers {', '.join(values['layers_to_save'])}"

    @classmethod
    def freezes_readout(cls, flags: Any, held: Callable[[], Mapping[str, Any]]) -> bool:
        """Whether the output layer is frozen by default; `held` gives the `values` of the cache in use."""
        return False

    @property
    def needs_fixed(self) -> bool:
        """Whether the values depend on noise, time or tokens."""
        return any(layer.stack for layer in self.layers)

    def once(self) -> Self:
        """The same with a single draw."""
        return replace(self, draws=1)

    def loss_types(self, adapter: PolicyAdapter) -> tuple[str, ...]:
        """Losses that can compare these values, the default first."""
        return ("mse", "l1", "cosine")

    @abstractmethod
    def take(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Fixed | None) -> dict[str, Output]:
        """Values [B, P, D] and mask [B, P] by layer (`str(layer)`), from teacher or student.

        Differentiable. `fixed` holds noise, time or tokens; None unless `needs_fixed`.
        """

    def columns(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Sequence[Fixed]) -> Columns:
        """Columns of a cache for the teacher's values on a batch; `fixed` has one entry per draw."""
        found = self.take(adapter, policy, batch, fixed[0] if fixed else None)
        return {
            f"{self.mode}.{name}": Ragged(values[mask].cpu(), mask.sum(dim=1).cpu())
            for name, (values, mask) in found.items()
        }

    def needed(self, adapter: PolicyAdapter, columns: Mapping[str, Any]) -> Needed:
        """The columns that a cache must have, except `fixed.*`; `columns` are those it has."""
        return {f"{self.mode}.{layer}": (True, []) for layer in self.layers}

    def compare(
        self,
        adapter: PolicyAdapter,
        policy: Any,
        batch: Batch,
        columns: Mapping[str, Column],
        fixed: Fixed,
        draw: int | Tensor = 0,
    ) -> list[Compared]:
        """The student's values next to the cached ones, one entry per layer, or one for the output."""
        found = self.take(adapter, policy, batch, fixed or None)
        return [
            Compared(name, values, at_valid(ragged(columns, f"{self.mode}.{name}"), mask), mask)
            for name, (values, mask) in found.items()
        ]

    def distance(self, compared: Compared, loss_type: str, scale: float | None = None) -> Tensor:
        """Distance between student and teacher: float32 [B], differentiable, divided by `scale` if given."""
        return drift(
            compared.student, compared.teacher, as_kind(loss_type), mask=compared.mask, scale=scale, reduction="none"
        )

    def deviation(self, drifts: Tensor, columns: Mapping[str, Column], adapter: PolicyAdapter) -> Tensor:
        """Drift [B] relative to the size of the cached values, so that one rounding floor fits all."""
        stored = [columns[name] for name in self.needed(adapter, columns)]
        flat = [(c.values if isinstance(c, Ragged) else c).double().flatten() for c in stored]
        return drifts / torch.cat(flat).square().mean().clamp_min(1e-12)

    @classmethod
    def can_measure(cls, columns: Columns, layers: Sequence[str]) -> bool:
        """Whether `vectors` can read these columns, which may be forged."""
        return all(isinstance(columns.get(f"{cls.mode}.{layer}"), Ragged) for layer in layers)

    @classmethod
    def vectors(cls, columns: Columns, layers: Sequence[str]) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Per layer: every retained vector [n, D] and its anchor's row [n], for measuring the spread."""
        for layer in layers:
            found = ragged(columns, f"{cls.mode}.{layer}")
            yield layer, found.values, torch.arange(len(found)).repeat_interleave(found.lengths)

    def token_columns(self, length: int) -> dict[str, tuple[int, torch.dtype, tuple[int, ...]]]:
        """For estimates: a token policy's columns for `length` tokens: rows per anchor, dtype, row shape."""
        return {}

    def disagreements(self, flags: Any, adapter: PolicyAdapter, policy: Any) -> list[str]:
        """What the training flags ask for that differs from this."""
        asked = layers_asked(flags)
        layers = adapter.resolve(policy, asked) if asked else self.layers
        if set(layers) == set(self.layers):
            return []
        flag = "layers_to_save" if flags.layers_to_save else "hidden_layer"
        return [f"layer {', '.join(map(str, layers))} ({setting(flag)}={asked})"]

    def __str__(self) -> str:
        return f"layer {', '.join(map(str, self.layers))}"


def layers_asked(flags: Any) -> str | None:
    """Layers as the user wrote them, one or several."""
    return flags.layers_to_save or flags.hidden_layer  # type: ignore[no-any-return]


def scale_problems(where: str, values: Mapping[str, float]) -> list[str]:
    """Problems of stored scales: a scale is a mean of distances, so finite in float32 and not negative."""
    return [
        f"{where}.{loss}: {value} is not a drift; expected a number from 0 to {_LARGEST_DRIFT:.1e}"
        for loss, value in values.items()
        if not 0 <= value <= _LARGEST_DRIFT
    ]


def as_kind(kind: str) -> DriftKind:
    """A loss type of hidden states or actions, as the type that `core.drift` takes."""
    return kind  # type: ignore[return-value]  # `loss_types` lists nothing else


def at_draw(column: Tensor, draw: int | Tensor) -> Tensor:
    """[B, draws, ...] -> [B, ...]: each anchor's draw for this visit, wrapping around."""
    return column[torch.arange(len(column)), torch.as_tensor(draw) % column.shape[1]]


def dense(column: Column) -> Tensor:
    """A column that must not be ragged."""
    if isinstance(column, Ragged):
        raise CraftError("the cache has a ragged column where rows of one shape belong: rebuild it")
    return column


def ragged(columns: Mapping[str, Column], name: str) -> Ragged:
    """A column that must be ragged."""
    column = columns.get(name)
    if not isinstance(column, Ragged):
        raise CraftError(f"the cache has no column {name!r}: it was built for other layers or another kind of values")
    return column


def at_valid(rows: Ragged, mask: Tensor) -> Tensor:
    """Ragged rows -> [B, T, ...]: row i fills the real positions of sample i, zero elsewhere."""
    lengths = mask.sum(dim=1).cpu()
    if not torch.equal(lengths, rows.lengths):
        worst = int((lengths - rows.lengths).abs().argmax())
        raise CraftError(
            f"the policy sees {int(lengths[worst])} real tokens where the teacher saw {int(rows.lengths[worst])}: the "
            "tokenizer, the prompt or the cameras are not those that the cache was built with"
        )
    values = rows.values.new_zeros((*mask.shape, *rows.values.shape[1:]), device=mask.device)
    values[mask] = rows.values.to(mask.device)
    return values


ENTRY_POINT_GROUP = "lerobot_craft.retention_modes"
MULTI_LAYER = "hidden_multi_layer"
"""What the original CRaFT notes call `hidden` with several layers."""

_BUILT_IN = {
    "hidden": "lerobot_craft.anchors.modes.hidden:Hidden",
    "token_ce": "lerobot_craft.anchors.modes.token_ce:TokenCE",
    "action": "lerobot_craft.anchors.modes.action:Action",
}
_registered: dict[str, type[Retained]] = {}


def register_mode[Mode: type[Retained]](mode: Mode) -> Mode:
    """Register a retention mode for this process under its `mode`. Use it as a class decorator.

    It takes precedence over installed and built-in modes.

    Raises:
        CraftError: The class is not a complete retention mode.
    """
    _require_mode(mode, repr(mode))
    _registered[mode.mode] = mode
    return mode


def known_modes() -> list[str]:
    """Names of the built-in, registered and installed modes."""
    return list(dict.fromkeys([*_BUILT_IN, *sorted(_registered), *sorted(installed(ENTRY_POINT_GROUP))]))


def mode_named(name: str) -> type[Retained]:
    """Find a mode by its name in `--retention_mode` or a manifest."""
    name = "hidden" if name == MULTI_LAYER else name
    if name in _registered:
        return _registered[name]
    # Installed modes take precedence over built-in ones: somebody installed them on purpose.
    target = installed(ENTRY_POINT_GROUP).get(name) or _BUILT_IN.get(name)
    if target is None:
        raise CraftError(
            f"{setting('retention_mode')} must be one of {', '.join(known_modes())}; got {name!r:.80}. Another one is "
            "a small file (docs/adding-a-retention-mode.md): name its module with --discover_packages_path"
        )
    module, _, attribute = target.partition(":")
    try:
        mode = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise CraftError(f"the retention mode {target} for {name!r} cannot be loaded: {error}") from error
    _require_mode(mode, target)
    return mode  # type: ignore[no-any-return]


def _require_mode(mode: object, described: str) -> None:
    if not (isinstance(mode, type) and issubclass(mode, Retained)):
        raise CraftError(f"{described} is not a class of Retained, so it is no retention mode")
    missing = [name for name in ("mode",) if not hasattr(mode, name)] + sorted(mode.__abstractmethods__)
    if missing:
        raise CraftError(
            f"the retention mode {mode.__name__} lacks {', '.join(missing)} (docs/adding-a-retention-mode.md)"
        )
