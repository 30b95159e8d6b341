"""Freezing: train only a part of the policy."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, ClassVar, override

from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.policies import PolicyAdapter, adapter_for, unwrapped
from lerobot_craft.policies.adapter import belongs_to
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Method

READOUT = "readout"

_OF_PEFT = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+|lora_\w+\.\w+)\.")


class Freeze(Method):
    """Plain fine-tuning of what `--craft.freeze` does not name.

    It holds names of parameters or modules, or patterns of them with `*`, separated by commas; `readout` stands for
    the modules that turn the last hidden states into the output.
    """

    name: ClassVar[str] = "freeze"
    label: ClassVar[str] = "frozen readout"  # what the bench freezes
    held: ClassVar[str | None] = "these parameters as they are: {freeze}"

    @override
    def compute(self) -> str:
        return "less: what is frozen needs no gradient"

    @override
    def freeze(self, policy: nn.Module, config: CraftConfig, policy_config: Any) -> None:
        policy = unwrapped(policy)
        patterns = [pattern.strip() for pattern in config.freeze.split(",") if pattern.strip()]
        if not patterns:
            raise CraftError(
                "--craft.method=freeze needs --craft.freeze: names or patterns of what is not trained, separated by "
                f"commas. {_what_there_is(policy)}"
            )
        frozen: set[str] = set()
        for pattern in patterns:
            modules = _readout(adapter_for(policy_config)) if pattern == READOUT else (pattern,)
            frozen |= _require_matches(policy, modules, f"--craft.freeze={pattern}")
        stopped = {id(parameter) for name, parameter in _parameters(policy) if name in frozen}
        if not any(p.requires_grad and id(p) not in stopped for p in policy.parameters()):
            raise CraftError(f"--craft.freeze={config.freeze} leaves nothing to train. {_what_there_is(policy)}")
        _freeze(policy, frozen)


def freeze_readout(policy: nn.Module, adapter: PolicyAdapter) -> list[str]:
    """Freeze the modules that turn the last hidden states into the output; returns the names of their parameters.

    A loss on hidden states sends no gradient there, so without this they drift as they like.
    """
    policy = unwrapped(policy)
    names = _require_matches(policy, _readout(adapter), f"the readout of {adapter.policy_type}")
    _freeze(policy, names)
    return sorted(names)


def _readout(adapter: PolicyAdapter) -> tuple[str, ...]:
    if not adapter.readout:
        raise CraftError(
            f"the adapter of {adapter.policy_type} does not say what its readout is: name the modules, as in "
            "--craft.freeze=model.head, or add `readout` to the adapter (docs/adding-a-policy.md)"
        )
    return adapter.readout


def _freeze(policy: nn.Module, names: set[str]) -> None:
    for name, parameter in _parameters(policy):
        if name in names:
            parameter.requires_grad_(False)


def _require_matches(policy: nn.Module, patterns: Iterable[str], what: str) -> set[str]:
    """Parameters whose name, or the name of a module around them, matches a pattern; each must match something."""
    found: set[str] = set()
    for pattern in patterns:
        names = {
            name
            for name, _ in _parameters(policy)
            if belongs_to(name, (pattern,)) or fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")
        }
        if not names:
            raise CraftError(f"{what} matches no parameter of the policy. {_what_there_is(policy)}")
        found |= names
    return found


def _parameters(policy: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters under the names that they have without PEFT, a tied one under each of its names.

    What PEFT trains in place of a weight, or adds to it, has the name of that weight: it is frozen with it.
    """
    return [(_OF_PEFT.sub(".", name), p) for name, p in policy.named_parameters(remove_duplicate=False)]


def _what_there_is(policy: nn.Module) -> str:
    """A sentence with the names of the policy's parts, below modules that hold only one other."""
    prefix, module = "", policy
    while len(children := [(n, c) for n, c in module.named_children() if any(True for _ in c.parameters())]) == 1:
        prefix, module = f"{prefix}{children[0][0]}.", children[0][1]
    names = [f"{prefix}{name}" for name, _ in children] or [prefix.removesuffix(".")]
    return f"Its parts are {', '.join(names)}."
