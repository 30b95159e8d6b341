"""Refuses checkpoints that would make lerobot run their own code, before lerobot loads them.

lerobot 0.6.1 runs code named by a checkpoint in three places. Some policy types load a model or tokenizer that
`config.json` names with `trust_remote_code=True`, whatever the settings: this runs a Python file in the checkpoint's
directory or in a repository named by its `auto_map`. A step of `policy_*processor.json` may name any class of any
module, which is imported and called with the given arguments. Some of lerobot's own steps also load models with
`trust_remote_code=True`. Weights and states are safetensors and JSON; nothing else in a checkpoint is executed.

So lerobot's policies and steps are loaded only if their code was reviewed, for each release
(tests/lerobot_api/test_foreign_code.py detects changes). Those of other packages are loaded if the user imported them.
"""

import contextlib
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

READ_POLICIES = frozenset(
    {"act", "diffusion", "eo1", "evo1", "fastwam", "lingbot_va", "molmoact2", "multi_task_dit"}
    | {"pi0", "pi05", "pi0_fast", "smolvla", "tdmpc", "vla_jepa", "vqbet", "xvla"}
)
"""Packages of `lerobot.policies` that run no code of a checkpoint, pi0_fast's tokenizers apart: those are checked."""
TRUSTING_STEPS = frozenset({"lerobot.processor.hil_processor.RewardClassifierProcessorStep"})
"""Steps of `lerobot.processor` that do: a reward classifier loads its encoder with trust_remote_code=True."""

_PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
_OWN_PACKAGE = "lerobot_craft"
# Settings of pi0_fast and its processor step that lerobot passes to transformers with trust_remote_code=True.
_TRUSTED_BY_LEROBOT = ("action_tokenizer_name", "text_tokenizer_name", "paligemma_tokenizer_name")
_vouched: set[str] = set()


def vouch_for(file: Path) -> None:
    """Allow copies of a Python file from an installed package: it could run anyway."""
    _vouched.add(hashlib.sha256(file.read_bytes()).hexdigest())


def refuse_foreign_code(config: Any) -> None:
    """Refuse a checkpoint that would run its own code when lerobot loads it.

    Args:
        config: lerobot's policy config; its `pretrained_path` is the checkpoint, if any.

    Raises:
        CraftError: It would run code, and `CRAFT_TRUST_REMOTE_CODE=1` is not set.
    """
    if os.environ.get(TRUST) == "1":
        return
    _check_type(config)
    steps = list(_saved_steps(config))
    for step in steps:
        _check_step(step, config)
    settings = [vars(config), *(step["config"] for step in steps if isinstance(step.get("config"), Mapping))]
    names = {known.get(key) for known in settings for key in _TRUSTED_BY_LEROBOT}
    for name in sorted(name for name in names if isinstance(name, str)):
        _check_tokenizer(name)


def _check_type(config: Any) -> None:
    """Require a policy type of lerobot's own to be a reviewed one; others come from an imported package."""
    home = type(config).__module__
    if _is_lerobots(home) and not _is_read(home):
        raise CraftError(
            f"lerobot may load what a policy of the type {config.type!r} names with trust_remote_code=True, so that "
            f"its checkpoint could run code of its own: look at what its config.json names; {_if_you_trust()}"
        )


def _is_lerobots(module: str) -> bool:
    return module.partition(".")[0] == "lerobot"


def _is_read(module: str) -> bool:
    """Whether a lerobot module belongs to its processors or to a reviewed policy."""
    _, room, *rest = [*module.split("."), ""]
    return room == "processor" or (room == "policies" and rest[0] in READ_POLICIES)


def _saved_steps(config: Any) -> Iterator[dict[str, Any]]:
    """Steps of both processors; missing or invalid files are left to the loader's error."""
    if config.pretrained_path is None:
        return
    for file in [_checkpoint_file(config, name) for name in _PROCESSORS]:
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        steps = content.get("steps") if isinstance(content, dict) else None
        yield from (step for step in steps if isinstance(step, dict)) if isinstance(steps, list) else ()


def _checkpoint_file(config: Any, name: str) -> Path:
    """A file of the checkpoint. For a Hub checkpoint, the file that lerobot will get, which may not exist."""
    directory = Path(config.pretrained_path)
    if directory.is_dir():
        return directory / name
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError

    try:
        return Path(hf_hub_download(str(directory), name, revision=getattr(config, "pretrained_revision", None)))
    except RemoteEntryNotFoundError:
        return directory / name
    except (OSError, HFValidationError) as error:
        raise CraftError(
            f"{name} of {directory} cannot be looked at before it is loaded ({str(error).strip().splitlines()[0]}): "
            f"download the policy with `hf download {directory}` and name its directory with --policy.path"
        ) from error


def _check_step(step: Mapping[str, Any], config: Any) -> None:
    """A step must be a reviewed lerobot class, or come from a package that is already imported."""
    if "registry_name" in step:
        named, found = step["registry_name"], _registered(step["registry_name"], config)
    elif "class" in step:
        named, found = step["class"], _imported(str(step["class"]))
    else:  # left to the loader's error
        return
    if found is None or not _may_run(found):
        raise CraftError(
            f"the processors of {config.pretrained_path} name {str(named)!r:.120}, which is no processor step that is "
            "known to run no code of a checkpoint, and of no imported package: loading it could run anything. If it is "
            f"a plugin's, name its package with --policy.discover_packages_path; {_if_you_trust()}"
        )


def _may_run(step: type) -> bool:
    if not _is_lerobots(step.__module__):
        return True
    return _is_read(step.__module__) and f"{step.__module__}.{step.__qualname__}" not in TRUSTING_STEPS


def _registered(name: object, config: Any) -> type | None:
    from lerobot.processor import ProcessorStepRegistry

    if not isinstance(name, str):
        return None
    if name not in ProcessorStepRegistry.list():
        # A plugin may register its steps only when lerobot imports its policy, which happens after this check.
        for part in ("modeling_", "processor_"):
            with contextlib.suppress(ImportError):
                importlib.import_module(type(config).__module__.replace("configuration_", part))
    return ProcessorStepRegistry.get(name) if name in ProcessorStepRegistry.list() else None


def _imported(named: str) -> type | None:
    """The named step class; a module that is not loaded yet is imported only if it is reviewed or our own."""
    from lerobot.processor import ProcessorStep

    module, _, name = named.rpartition(".")
    may_be = _is_read(module) if _is_lerobots(module) else module.partition(".")[0] == _OWN_PACKAGE
    if not may_be and module not in sys.modules:
        return None
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, ProcessorStep) else None


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
    """Classes that transformers would load from Python files, according to every `auto_map`."""
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
