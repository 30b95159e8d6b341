"""What CRaFT must know about a policy: one adapter per policy type, found by the type's name.

An adapter calls the policy's own parts, reads hidden states on their way (`taps.py`), and fixes the random inputs
(noise, time, tokens), so that a student with the same weights reproduces the teacher's values exactly.

Third parties add adapters without changing this package. Installed distributions declare an entry point. A script or
notebook registers its adapter for its own process.
"""

import functools
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lerobot_craft.core import TokenSpans
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.policies.taps import ImageEmbedder

Batch = Mapping[str, Any]  # as the policy's preprocessor returns it
Fixed = dict[str, Tensor]  # fixed random inputs of an output; each [B, ...], in the dtype it is stored in
OutputKind = Literal["logits", "velocity", "noise", "actions"]


@dataclass(frozen=True, order=True)
class Layer:
    """The address of a layer: `index` counts from 0 within a stack; the backbone's stack is ''."""

    stack: str
    index: int

    def __str__(self) -> str:
        return f"{self.stack}:{self.index}" if self.stack else str(self.index)


class Tokens(NamedTuple):
    """Hidden states of one layer: its output, before any norm."""

    hidden: Tensor  # [B, T, D], differentiable
    mask: Tensor  # [B, T], False at padding and at the tokens of missing cameras
    spans: TokenSpans


class Output(NamedTuple):
    """The policy's output, differentiable."""

    values: Tensor  # [B, P, D]: P token positions with D logits, or P action steps with D dimensions
    mask: Tensor  # [B, P]


class Demonstration(NamedTuple):
    """The demonstrator's value in place of the policy's output.

    Without a demonstration the policy's own actions stand in, so that the error is the policy's own uncertainty.
    """

    values: Tensor  # [B, P, D], or token ids [B, P] where the output is logits
    mask: Tensor  # [B, P]
    fixed: Fixed  # for computing the policy's output that this is compared with


class PolicyAdapter(ABC):
    """Features and outputs of one policy type.

    `policy` is always the lerobot policy itself (inside DDP and PEFT wrappers: see `unwrapped`). `batch` is the output
    of its preprocessor. Each row of a result depends only on the same row of the batch.
    """

    policy_type: ClassVar[str]
    output_kind: ClassVar[OutputKind]
    reads_instruction: ClassVar[bool]
    """Whether the policy is told what to do. Without it, cross anchors have no meaning."""
    train_mode: ClassVar[bool]
    """The mode for anchors. Eval where train mode draws random numbers (dropout, crops, a latent); else train mode,
    which is what gradient checkpointing is bound to."""
    fixed_names: ClassVar[tuple[str, ...]]
    """What of `fix` must be kept to reproduce an output; `fix` may return more, for `demonstration`."""

    state_inputs: ClassVar[tuple[str, ...]] = ()
    """Modules that embed the state where no other token reads it: holding these alone holds no skill."""
    readout: ClassVar[tuple[str, ...]] = ()
    """Modules that turn the last hidden states into the output: no loss on hidden states holds them."""

    @property
    def is_drawn(self) -> bool:
        """Whether an output depends on noise, so that more draws give more information about an anchor."""
        return self.output_kind != "logits" and bool(self.fixed_names)

    @abstractmethod
    def stacks(self, policy: Any) -> dict[str, int]:
        """Number of layers per stack; the backbone is ''."""

    @abstractmethod
    def hidden(
        self, policy: Any, batch: Batch, layers: Sequence[Layer], fixed: Fixed | None = None
    ) -> dict[Layer, Tokens]:
        """Hidden states at `layers`, from the cheapest pass that computes them all.

        Backbone layers need observations only; layers of other stacks also need `fixed`.
        """

    @abstractmethod
    def fix(self, policy: Any, batch: Batch, rngs: Sequence[np.random.Generator], draws: int = 1) -> list[Fixed]:
        """Draw the random inputs of an output `draws` times. Row i uses only `rngs[i]`, in any batch."""

    @abstractmethod
    def output(self, policy: Any, batch: Batch, fixed: Fixed) -> Output:
        """The policy's output under `fixed`."""

    def outputs(self, policy: Any, batch: Batch, draws: Sequence[Fixed]) -> list[Output]:
        """The output under each draw, equal to the bit to as many calls of `output`."""
        return [self.output(policy, batch, fixed) for fixed in draws]

    @abstractmethod
    def demonstration(self, policy: Any, batch: Batch, fixed: Fixed) -> Demonstration:
        """The demonstrator's value; `fixed` must come from `fix` on the same batch."""

    def image_embedder(self, policy: Any) -> ImageEmbedder | None:
        """What embeds images, if one method does: anchors skip it while it is not trained."""
        return None

    @abstractmethod
    def reaches(self, policy: Any, layers: Sequence[Layer] | None) -> Iterable[str]:
        """Names of modules or parameters that affect the hidden states at `layers`, or (None) the output."""

    def resolve(self, policy: Any, wanted: str | Sequence[int | str]) -> tuple[Layer, ...]:
        """Resolve layer addresses as a user writes them: `-2`, `-2,-1`, `all`, `expert:-1`, `expert:all`."""
        stacks = self.stacks(policy)
        parts = wanted.split(",") if isinstance(wanted, str) else wanted
        layers = [layer for part in parts for layer in _resolve_one(str(part).strip(), stacks, self.policy_type)]
        if not layers:
            raise CraftError(f"no layer is named: give e.g. {setting('layers_to_save')}=-2,-1")
        return tuple(dict.fromkeys(layers))

    def token_labels(self, fixed: Fixed) -> tuple[Tensor, Tensor]:
        """Token ids [B, P] that the logits at the same positions should predict, and their mask."""
        raise CraftError(
            f"{self.policy_type} puts out {self.output_kind}, not tokens, so token_ce is not defined for it: "
            f"use {setting('retention_mode')}=action"
        )

    def reached_parameters(self, policy: Any, layers: Sequence[Layer] | None) -> list[str]:
        """Names of all parameters, trained or not, that affect the values at `layers` (None: the output)."""
        modules = tuple(self.reaches(policy, layers))
        return [name for name, _ in policy.named_parameters() if belongs_to(name, modules)]

    def masks_missing_cameras(self, policy: Any) -> bool:
        """Whether a camera missing from a batch becomes masked tokens instead of an error."""
        return False

    def how_to_reach(self, policy: Any) -> str:
        """What a user can change if retention reaches no trained parameter."""
        return "unfreeze what the anchors' values are computed from"


def belongs_to(name: str, modules: Iterable[str]) -> bool:
    """Whether a parameter is one of `modules` or inside one of them."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def unwrapped(policy: Any) -> Any:
    """The lerobot policy inside DDP, torch.compile and PEFT wrappers. PEFT's adapter layers stay inside it."""
    while True:
        if hasattr(policy, "get_base_model"):
            policy = policy.get_base_model()
        elif hasattr(policy, "_orig_mod"):
            policy = policy._orig_mod
        elif hasattr(policy, "module") and not hasattr(policy, "config"):
            policy = policy.module
        else:
            return policy


def normal(rngs: Sequence[np.random.Generator], shape: Sequence[int], device: torch.device) -> Tensor:
    """Standard normal [B, *shape], row i from `rngs[i]`."""
    rows = np.stack([rng.standard_normal(tuple(shape), dtype=np.float32) for rng in rngs])
    return torch.from_numpy(rows).to(device)


def _resolve_one(part: str, stacks: dict[str, int], policy_type: str) -> list[Layer]:
    stack, _, index = part.rpartition(":")
    if stack not in stacks:
        named = ", ".join(name for name in stacks if name) or "none"
        raise CraftError(f"{policy_type} has no stack of layers named {stack!r} (beside its backbone: {named})")
    count = stacks[stack]
    if index == "all":
        return [Layer(stack, i) for i in range(count)]
    try:
        number = int(index)
    except ValueError:
        raise CraftError(f"{part!r} is no layer: write -2, or -2,-1, or all, or expert:-1") from None
    if not -count <= number < count:
        where = f"stack {stack!r}" if stack else "backbone"
        raise CraftError(f"layer {number} does not exist: the {where} of this {policy_type} has {count} layers")
    return [Layer(stack, number % count)]


class Reach(NamedTuple):
    """Trainable parameters that the retention gradient reaches (`held`), and the others (`free`)."""

    held: list[str]
    free: list[str]
    """Trained without any retention gradient: these may drift as they like."""


def reach_of(adapter: PolicyAdapter, policy: Any, layers: Sequence[Layer] | None) -> Reach:
    """Reach of retention on the hidden states at `layers`, or (None) on the output."""
    policy = unwrapped(policy)
    reached = set(adapter.reached_parameters(policy, layers))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    return Reach([name for name in trained if name in reached], [name for name in trained if name not in reached])


def check_reach(adapter: PolicyAdapter, policy: Any, layers: Sequence[Layer] | None) -> Reach:
    """Like `reach_of`, but refuses a configuration in which retention holds nothing."""
    reach = reach_of(adapter, policy, layers)
    if all(layers is not None and belongs_to(name, adapter.state_inputs) for name in reach.held):
        what = "the output" if layers is None else f"hidden states at layer {', '.join(map(str, layers))}"
        found = f"only {', '.join(adapter.state_inputs)}" if reach.held else "no trained parameter"
        count = len(reach.held) + len(reach.free)
        trained = f"{count} trained tensors" if count else "nothing: every parameter is frozen"
        raise CraftError(
            f"retention on {what} of {adapter.policy_type} reaches {found} (this configuration trains {trained}), "
            f"so it would hold nothing: {adapter.how_to_reach(unwrapped(policy))}"
        )
    return reach


ENTRY_POINT_GROUP = "lerobot_craft.policies"

_BUILT_IN = {
    "act": "lerobot_craft.policies.act:ACTAdapter",
    "diffusion": "lerobot_craft.policies.diffusion:DiffusionAdapter",
    "pi0": "lerobot_craft.policies.pi0:PI0Adapter",
    "pi05": "lerobot_craft.policies.pi0:PI05Adapter",
    "pi0_fast": "lerobot_craft.policies.pi0_fast:PI0FastAdapter",
    "smolvla": "lerobot_craft.policies.smolvla:SmolVLAAdapter",
}
_GIVEN = ("policy_type", "output_kind", "reads_instruction", "train_mode", "fixed_names")  # required, without a default
_registered: dict[str, type[PolicyAdapter]] = {}


def register_adapter[Adapter: type[PolicyAdapter]](adapter: Adapter) -> Adapter:
    """Register an adapter for this process under its `policy_type`. Use it as a class decorator.

    It takes precedence over installed and built-in adapters. Other processes, such as the command `craft`, find it only
    if they import the module that registers it (`--policy.discover_packages_path`).

    Raises:
        CraftError: The class is not a complete adapter.
    """
    if not (isinstance(adapter, type) and issubclass(adapter, PolicyAdapter)):
        raise CraftError(f"{adapter!r} is not a class of PolicyAdapter, so it cannot be registered")
    missing = [name for name in _GIVEN if not hasattr(adapter, name)] + sorted(adapter.__abstractmethods__)
    if missing:
        raise CraftError(f"the adapter {adapter.__name__} lacks {', '.join(missing)} (docs/adding-a-policy.md)")
    _registered[adapter.policy_type] = adapter
    return adapter


def supported_policies() -> list[str]:
    """Policy types with a built-in, registered or installed adapter."""
    return sorted({*_BUILT_IN, *_registered, *installed(ENTRY_POINT_GROUP)})


def adapter_for(config: Any) -> PolicyAdapter:
    """The adapter of a policy config: for its own type, else for the nearest base class that has one."""
    for policy_type in _types_of(config):
        if adapter := _load(policy_type):
            return adapter
    raise CraftError(
        f"CRaFT has no adapter for the policy type {config.type!r}. It knows {', '.join(supported_policies())}; "
        "docs/adding-a-policy.md shows how to add one in a small file, also from another package"
    )


def _types_of(config: Any) -> list[str]:
    registered = {cls: name for name, cls in type(config).get_known_choices().items()}
    return [registered[cls] for cls in type(config).__mro__ if cls in registered]


def _load(policy_type: str) -> PolicyAdapter | None:
    if policy_type in _registered:
        return _registered[policy_type]()
    # Installed adapters take precedence over built-in ones: somebody installed them on purpose.
    target = installed(ENTRY_POINT_GROUP).get(policy_type) or _BUILT_IN.get(policy_type)
    if target is None:
        return None
    module, _, name = target.partition(":")
    try:
        adapter = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError) as error:  # TypeError: a method of the contract is missing
        raise CraftError(f"the adapter {target} for {policy_type} cannot be loaded: {error}") from error
    if not isinstance(adapter, PolicyAdapter):
        raise CraftError(f"the adapter {target} for {policy_type} is not a PolicyAdapter (docs/adding-a-policy.md)")
    return adapter


def installed(group: str) -> dict[str, str]:
    """Entry points of a group in installed distributions: name -> target."""
    places = []
    for place in sys.path:
        with suppress(OSError):  # does not exist
            places.append((place, Path(place).stat().st_mtime_ns))
    return _installed_in(tuple(places), group)


@functools.lru_cache(maxsize=16)
def _installed_in(places: tuple[tuple[str, int], ...], group: str) -> dict[str, str]:
    """Cached by the directories' modification times, which change with an installation.

    Reading entry points opens a file of every installed distribution.
    """
    return {entry.name: entry.value for entry in entry_points(group=group)}
