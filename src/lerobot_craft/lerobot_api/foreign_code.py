"""A checkpoint is data: what in it would make lerobot run code is refused before lerobot sees it.

lerobot 0.6.1 runs what a checkpoint names in two places. A step of `policy_*processor.json` may name any class of any
module, which is imported and called with the arguments that stand beside it. And pi0_fast loads its two tokenizers with
`trust_remote_code=True`, whatever the settings say: a Python file in the tokenizer's directory, or in a repository that
its `auto_map` names, is run. Weights and states are safetensors and JSON; nothing else of a checkpoint is executed.
"""

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lerobot_craft.errors import CraftError

TRUST = "CRAFT_TRUST_REMOTE_CODE"
"""Environment variable; 1 lets a checkpoint's own code run."""
LEROBOTS_TOKENIZERS = frozenset({"google/paligemma-3b-pt-224", "lerobot/fast-action-tokenizer"})
"""What stock pi0_fast names; lerobot downloads and trusts them, and it is lerobot that is trusted here."""

_PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
_OWN_PACKAGES = ("lerobot", "lerobot_craft")
# Settings of pi0_fast and of its step whose value lerobot hands to transformers with trust_remote_code=True.
_TRUSTED_BY_LEROBOT = ("action_tokenizer_name", "text_tokenizer_name", "paligemma_tokenizer_name")
_vouched: set[str] = set()


def vouch_for(file: Path) -> None:
    """Let copies of a Python file of an installed package run: it could run anyway."""
    _vouched.add(hashlib.sha256(file.read_bytes()).hexdigest())


def refuse_foreign_code(config: Any) -> None:
    """Refuse a policy's checkpoint that would run code of its own when lerobot loads it.

    Args:
        config: lerobot's policy config; its `pretrained_path` is the checkpoint, if there is one.

    Raises:
        CraftError: It would, and `CRAFT_TRUST_REMOTE_CODE=1` was not set.
    """
    if os.environ.get(TRUST) == "1":
        return
    steps = list(_saved_steps(Path(config.pretrained_path))) if config.pretrained_path is not None else []
    for step in steps:
        _check_class(step, config.pretrained_path)
    settings = [vars(config), *(step["config"] for step in steps if isinstance(step.get("config"), Mapping))]
    names = {known.get(key) for known in settings for key in _TRUSTED_BY_LEROBOT}
    for name in sorted(name for name in names if isinstance(name, str)):
        _check_tokenizer(name)


def _saved_steps(checkpoint: Path) -> Iterator[dict[str, Any]]:
    """Of both processors; a file that is missing or no JSON is for the loader to complain about."""
    for name in _PROCESSORS:
        try:
            content = json.loads((checkpoint / name).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        steps = content.get("steps") if isinstance(content, dict) else None
        yield from (step for step in steps or () if isinstance(step, dict))


def _check_class(step: Mapping[str, Any], checkpoint: object) -> None:
    """A step without a registered name must be a class of processor steps, in a module that is trusted already."""
    named = step.get("class")
    if "registry_name" in step or named is None or _is_step(str(named)):
        return
    raise CraftError(
        f"the processors of {checkpoint} name {str(named)!r:.120}, which is no processor step of lerobot or of an "
        "imported package: loading it could run anything. If it is a plugin's, name its package with "
        f"--policy.discover_packages_path; {_if_you_trust()}"
    )


def _is_step(named: str) -> bool:
    from lerobot.processor import ProcessorStep

    module, _, name = named.rpartition(".")
    if module.partition(".")[0] not in _OWN_PACKAGES and module not in sys.modules:
        return False
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return isinstance(found, type) and issubclass(found, ProcessorStep)


def _check_tokenizer(name: str) -> None:
    directory = Path(name)
    if not directory.is_dir():
        if name not in LEROBOTS_TOKENIZERS:
            raise CraftError(
                f"the policy names the tokenizer {name!r:.120}, and lerobot would run whatever code that repository of "
                f"the Hub holds: download it, look at it and name its directory; {_if_you_trust()}"
            )
        return
    references = list(_code_references(directory))
    # A reference may lead to another repository, or by a path out of the directory.
    elsewhere = [reference for reference in references if not reference.partition(".")[0].isidentifier()]
    unknown = [file.name for file in sorted(directory.rglob("*.py")) if not _is_vouched(file)]
    if references and (elsewhere or unknown):
        raise CraftError(
            f"the tokenizer in {directory} brings code of its own ({[*elsewhere, *unknown][0]:.120}), which lerobot "
            f"would run: look at it first; {_if_you_trust()}"
        )


def _code_references(directory: Path) -> Iterator[str]:
    """Classes that transformers would take from Python files: what every `auto_map` says."""
    for file in sorted(directory.glob("*.json")):
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        mapped = content.get("auto_map") if isinstance(content, dict) else None
        yield from _texts(mapped)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _is_vouched(file: Path) -> bool:
    return hashlib.sha256(file.read_bytes()).hexdigest() in _vouched


def _if_you_trust() -> str:
    return f"if you trust it, set {TRUST}=1"
