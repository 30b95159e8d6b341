"""Configs, checkpoints and precision of lerobot's policies."""

import contextlib
import importlib
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import policy_in
from lerobot_craft.lerobot_api.foreign_code import refuse_foreign_code

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"

_CHECKPOINT_FILES = ["*.json", "*.safetensors"]
_MEMORY_FILES = "craft_memory/*"
_SUBDIRECTORIES = "*/*"  # may contain checkpoints of an unfinished training
_HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Logged by the root logger for every checkpoint of the pi0 family, even good ones.
_PATCH_EMBEDDING_NOTICE = "Vision embedding key might need handling"

WRONG_SETTING = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What Python and torch raise for a setting of the wrong type or size; lerobot checks few settings of a checkpoint."""

logger = logging.getLogger(__name__)


class PolicyConfig(Protocol):
    """The part of lerobot's `PreTrainedConfig` that craft reads."""

    device: str
    pretrained_path: Path | None
    pretrained_revision: str | None
    input_features: dict[str, Any]
    n_action_steps: int

    @property
    def type(self) -> str:
        """The policy's registered name in lerobot."""


def in_short(error: BaseException) -> str:
    """The first line of an error, with its type where the text alone says little, such as a key's name."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    said = lines[0] if len(lines) == 1 or not lines[0].endswith(":") else f"{lines[0]} {lines[1].strip()}"
    is_a_sentence = isinstance(error, ValueError) or not isinstance(error, WRONG_SETTING)
    return said if is_a_sentence else f"{type(error).__name__}: {said}"


def load_plugin(package: str) -> None:
    """Import code that registers policies, environments or retention modes: `--discover_packages_path`.

    A package is imported with its modules, as in lerobot. Unlike in lerobot, it may also be a single module.
    """
    from lerobot.configs import parser

    try:
        if hasattr(importlib.import_module(package), "__path__"):
            parser.load_plugin(package)
    except (ImportError, parser.PluginLoadError) as error:
        raise CraftError(f"--discover_packages_path={package} cannot be imported: {error}") from error


def load_policy_config(path: str | Path, overrides: Sequence[str] = ()) -> PolicyConfig:
    """The config of a checkpoint directory, as `lerobot-train --policy.path` reads it.

    Args:
        path: A directory written by lerobot's `save_pretrained`.
        overrides: Settings as on lerobot's command line without `policy.`, such as `--device=cpu`.

    Returns:
        lerobot's config, with `pretrained_path` set to `path`.

    Raises:
        CraftError: Not a checkpoint directory, an unknown policy type or setting, or code that would run.
    """
    directory = _checkpoint_directory(path)
    require_config(directory)
    import lerobot.policies  # noqa: F401  registers the policy types
    from draccus.utils import DraccusException
    from lerobot.configs import PreTrainedConfig
    from lerobot.utils.import_utils import register_third_party_plugins
    from yaml import YAMLError

    register_third_party_plugins()
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):  # argparse prints its whole usage there
            config: Any = PreTrainedConfig.from_pretrained(directory, cli_overrides=list(overrides))
    except SystemExit as error:
        reason = complaint.getvalue().strip().rpartition("error: ")[2]
        raise CraftError(f"The policy in {directory} has no such setting: {reason}.") from error
    except (DraccusException, YAMLError, *WRONG_SETTING) as error:
        raise CraftError(
            f"lerobot cannot read {directory / CONFIG_FILE}: {in_short(error).removesuffix('.')}. Copy the checkpoint "
            "again if that setting is wrong. If the policy comes from a plugin, install it or name its package with "
            "--policy.discover_packages_path."
        ) from error
    config.pretrained_path = directory
    refuse_foreign_code(config)
    return config  # type: ignore[no-any-return]


def require_config(directory: Path) -> None:
    """Refuse a truncated or invalid `config.json` by name: lerobot's parser quotes only its text."""
    file = directory / CONFIG_FILE
    if not file.is_file():  # left to lerobot's error
        return
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CraftError(
            f"{file} is no JSON ({reason}): it is damaged or only a part of it was copied. Copy the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise CraftError(f"{file} holds {content!r:.80} and not the settings of a policy. Copy the checkpoint again")


def local_checkpoint(path: str | Path, revision: str | None = None) -> Path:
    """The directory of a checkpoint: the path itself, or the download directory of a Hub policy.

    For a training's output directory, the policy of its last checkpoint; for a checkpoint, the policy inside.
    """
    if Path(path).is_dir():
        return policy_in(Path(path))
    if not may_be_on_the_hub(path):
        raise CraftError(
            f"There is no checkpoint directory {path}. Give the output directory of a training, one of its "
            "checkpoints, or a policy of the Hub as USER/NAME."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        # Two calls into one directory: no single pattern excludes all subdirectories but one.
        snapshot_download(str(path), revision=revision, allow_patterns=_MEMORY_FILES)
        return Path(
            snapshot_download(
                str(path), revision=revision, allow_patterns=_CHECKPOINT_FILES, ignore_patterns=_SUBDIRECTORIES
            )
        )
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CraftError(
            f"There is no checkpoint directory {path}, and the Hub does not give a policy of that name ({reason})."
        ) from error


def may_be_on_the_hub(path: str | Path) -> bool:
    """Whether this has the form of a name on the Hub."""
    return _HUB_NAME.fullmatch(str(path)) is not None


def _checkpoint_directory(path: str | Path) -> Path:
    directory = local_checkpoint(path)
    if (directory / CONFIG_FILE).is_file():
        return directory
    raise CraftError(
        f"{directory} has no {CONFIG_FILE}, so it is not a policy checkpoint. Use the directory that lerobot-train "
        "wrote as checkpoints/<step>/pretrained_model."
    )


def import_policy(policy_type: str) -> None:
    """Import a policy's code and lerobot's code for it.

    Raises:
        ImportError: A package is missing.
        ValueError: lerobot knows no such policy.
    """
    from lerobot.policies.factory import get_policy_class

    get_policy_class(policy_type)


def load_policy(config: PolicyConfig) -> nn.Module:
    """The policy of `config.pretrained_path` in eval mode, on its device, with the features of its own config.

    Loads like lerobot's `make_policy`, but without a dataset or environment, which would overwrite the config's output
    features. A backbone's ImageNet weights are not downloaded, because the checkpoint overwrites them. **Do not trust
    the result yet**: the pi0 family's loader may silently return random weights. Call
    `lerobot_craft.teacher.weights.check_weights`.

    Raises:
        CraftError: The policy's packages are missing, or the file does not fit the policy.
    """
    from lerobot.policies.factory import get_policy_class

    with plain_making(config), quiet_loading(), _no_backbone_download(config):
        policy: nn.Module = get_policy_class(config.type).from_pretrained(
            pretrained_name_or_path=config.pretrained_path, config=config, revision=config.pretrained_revision
        )
    return policy.to(config.device).eval()


@contextlib.contextmanager
def plain_making(config: PolicyConfig, dataset: str | None = None) -> Iterator[None]:
    """Errors of making a policy as one sentence. lerobot checks few settings, so `config.json` may cause any.

    Args:
        config: The policy's config.
        dataset: Name of the dataset that sets the size of its actions, if one does.
    """
    from safetensors import SafetensorError

    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except ImportError as error:
        raise CraftError(f"The policy type {config.type} needs a package that is not installed: {error}") from error
    except (OSError, SafetensorError) as error:
        raise CraftError(f"The policy in {config.pretrained_path} cannot be loaded: {error}") from error
    except WRONG_SETTING as error:
        lines = str(error).splitlines()
        if lines and "loading state_dict" in lines[0]:
            actions = f"with the actions of {dataset}" if dataset else "its config.json describes"
            other = f"Use a dataset with the policy's actions; if {dataset} has them, copy" if dataset else "Copy"
            raise CraftError(
                f"The weights in {config.pretrained_path} do not fit the policy {actions}: "
                f"{lines[1].strip()}{f' And {len(lines) - 2} more.' if len(lines) > 2 else ''} {other} the checkpoint "
                "again, its config.json with it."
            ) from error
        if config.pretrained_path is None:
            raise CraftError(f"lerobot cannot make a policy with these --policy flags: {in_short(error)}") from error
        raise CraftError(
            f"lerobot cannot make the policy that {Path(config.pretrained_path) / CONFIG_FILE} describes "
            f"({in_short(error)}). A setting in it or a --policy flag is wrong: if it is none of your flags, copy the "
            "checkpoint again"
        ) from error


@contextlib.contextmanager
def _no_backbone_download(config: Any) -> Iterator[None]:
    """Keep ACT, diffusion and VQ-BeT from downloading ResNet weights when they are constructed."""
    named = getattr(config, "pretrained_backbone_weights", None)
    if named is None:
        yield
        return
    config.pretrained_backbone_weights = None
    try:
        yield
    finally:
        config.pretrained_backbone_weights = named


@contextlib.contextmanager
def quiet_loading() -> Iterator[None]:
    """Send lerobot's loader output to the debug log, and drop a meaningless notice."""

    def informs(record: logging.LogRecord) -> bool:
        return _PATCH_EMBEDDING_NOTICE not in record.getMessage()

    chatter, root = io.StringIO(), logging.getLogger()
    root.addFilter(informs)
    try:
        with contextlib.redirect_stdout(chatter):
            yield
    finally:
        root.removeFilter(informs)
        if chatter.getvalue():
            logger.debug("lerobot: %s", chatter.getvalue().strip())


class _NameInFile(str):
    """A tensor's name in the file; stands in for the tensor in a loader's key mapping."""

    __slots__ = ()

    def clone(self) -> "_NameInFile":
        return self


def checkpoint_sources(policy: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Which tensor of a weights file the policy's own loader puts into which entry of its state.

    Args:
        policy: A loaded policy.
        names: The file's tensors in the loader's order: if two map to one entry, the later one wins.

    Returns:
        Entry of the policy's state -> name in the file. The pi0 family renames; others keep the names.
    """
    rename = getattr(policy, "_fix_pytorch_state_dict_keys", None)
    if rename is None:
        return {name: name for name in names}
    with quiet_loading():
        renamed: dict[str, str] = rename({name: _NameInFile(name) for name in names}, policy.config)
    return {key if key.startswith("model.") else f"model.{key}": str(source) for key, source in renamed.items()}


def state_below_adapters(policy: Any) -> dict[str, torch.Tensor]:
    """The state of a policy as it was before PEFT put adapters on it, under the names that it had."""
    if not hasattr(policy, "get_base_model"):
        state: dict[str, torch.Tensor] = policy.state_dict()
        return state
    added = (policy.base_model.prefix, "modules_to_save.")
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in policy.get_base_model().state_dict().items()
        if not any(f".{each}" in f".{name}" for each in added)
    }


def autocast_name(config: PolicyConfig) -> str | None:
    """The mixed precision in which `lerobot-train` would run this policy: `bf16`, `fp16` or None.

    From the policy's `dtype` setting, else its `use_amp`, else the variable of `accelerate launch --mixed_precision`.
    """
    by_dtype = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}
    name = by_dtype.get(getattr(config, "dtype", None) or "")
    if not hasattr(config, "dtype") and getattr(config, "use_amp", False):
        default = torch.get_autocast_dtype(torch.device(config.device).type)
        name = {dtype: short for short, dtype in _DTYPES.items()}[default]
    name = name or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if name == "fp16" and torch.device(config.device).type == "cpu":
        return None  # accelerate silently runs it in full precision there
    return name if name in _DTYPES else None


def autocast_dtype(config: PolicyConfig) -> str | None:
    """The dtype of `autocast_name` in torch's spelling, such as `bfloat16`."""
    name = autocast_name(config)
    return None if name is None else str(_DTYPES[name]).removeprefix("torch.")


def autocast(config: PolicyConfig) -> contextlib.AbstractContextManager[Any]:
    """The autocast context of `autocast_name`; enter a new one for each forward."""
    name = autocast_name(config)
    if name is None:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(config.device).type, dtype=_DTYPES[name])
