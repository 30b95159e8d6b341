"""Configs, checkpoints and precision of lerobot's policies; and policies without weights.

A policy without weights has names, shapes and dtypes: it is on the meta device and needs no download.
"""

import contextlib
import copy
import dataclasses
import importlib
import io
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
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
    `lerobot_craft.anchors.teacher.check_weights`.

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


# Backbone weights that lerobot would load at construction; they change no shape.
_NO_DOWNLOAD = {"pretrained_backbone_weights": None}


def weightless_policy(config: Any, dataset_meta: Any | None, rename_map: dict[str, str] | None = None) -> nn.Module:
    """The policy of a training run before its weights are read, including its own PEFT adapters.

    Args:
        config: lerobot's policy config; its features are set from the dataset, as in training.
        dataset_meta: The dataset's metadata; None: features from the config.
        rename_map: As for training.

    Raises:
        CraftError: A config (of the language model) is not on this machine, or the settings do not fit together.
    """
    from lerobot.policies import get_policy_class, make_policy

    made = copy.copy(config)
    made.pretrained_path, made.use_peft, made.device = None, False, "meta"
    for name, value in _NO_DOWNLOAD.items():
        if hasattr(made, name):
            setattr(made, name, value)
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.CRITICAL)  # lerobot logs its missing tokenizers as errors
    try:
        with torch.device("meta"), _nothing_is_read(), contextlib.redirect_stdout(io.StringIO()):
            if dataset_meta is None:
                policy: nn.Module = get_policy_class(made.type)(made)
            else:
                policy = make_policy(cfg=made, ds_meta=dataset_meta, rename_map=rename_map)
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()
        raise CraftError(
            f"the policy cannot be laid out ({reason[0] if reason else type(error).__name__}): what describes it must "
            "be on this machine, because an estimate downloads nothing"
        ) from error
    finally:
        root.setLevel(level)
    config.input_features, config.output_features = made.input_features, made.output_features
    policy.config = config
    if config.pretrained_path is not None and config.use_peft:
        return _with_saved_adapter(policy, config)
    return policy


def _with_saved_adapter(policy: nn.Module, config: Any) -> nn.Module:
    from peft import PeftConfig, get_peft_model

    with torch.device("meta"):
        wrapped: nn.Module = get_peft_model(policy, PeftConfig.from_pretrained(str(config.pretrained_path)))
    return wrapped


def check_shapes(policy: nn.Module, directory: Path) -> bool:
    """Whether there is a weights file; compares its header with the policy, without reading weights.

    Raises:
        CraftError: A tensor of the file has another shape than the policy's.
    """
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CraftError(f"{path} cannot be read ({error}): copy the checkpoint again") from error
    state = policy.state_dict()
    for entry, name in checkpoint_sources(policy, shapes).items():
        if entry in state and tuple(state[entry].shape) != shapes[name]:
            raise CraftError(
                f"{path} has {name} of shape {shapes[name]}, its config.json describes {tuple(state[entry].shape)}: "
                "copy the checkpoint again, its config.json with it"
            )
    return True


def wrap_peft_weightless(policy: nn.Module, cfg: Any) -> nn.Module:
    """The policy with the adapters of `--peft.*`, on the meta device."""
    if cfg.peft is None or hasattr(policy, "disable_adapter"):
        return policy
    try:
        with torch.device("meta"):
            wrapped: nn.Module = policy.wrap_with_peft(peft_cli_overrides=dataclasses.asdict(cfg.peft))  # type: ignore[operator]
    except (ImportError, ValueError) as error:
        raise CraftError(f"--peft: {error}") from error
    return wrapped


class _Absent:
    """Stands in for a tokenizer that is not on this machine: no parameter depends on it."""

    def __getattr__(self, name: str) -> "_Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent()

    def __call__(self, *args: Any, **kwargs: Any) -> "_Absent":
        return _Absent()

    def __index__(self) -> int:
        return 0

    __int__ = __index__


@contextlib.contextmanager
def _nothing_is_read() -> Iterator[None]:
    """Build transformers models from their configs and replace missing tokenizers; nothing is downloaded."""
    import transformers
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

    def model(cls: Any, name: str, /, *args: Any, torch_dtype: str | None = None, **kwargs: Any) -> Any:
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
        # Not `.to(...)`: what is made from the model's config later, such as SmolVLA's expert, has that type too.
        return cls.from_config(config, **({} if torch_dtype is None else {"dtype": getattr(torch, torch_dtype)}))

    of_models = [cls for cls in _BaseAutoModelClass.__subclasses__() if "from_pretrained" in vars(cls)]
    readers: dict[Any, Any] = {
        **dict.fromkeys([_BaseAutoModelClass, *of_models], classmethod(model)),
        transformers.AutoTokenizer: partial(_if_here, transformers.AutoTokenizer.from_pretrained),
        transformers.AutoProcessor: partial(_if_here, transformers.AutoProcessor.from_pretrained),
    }
    before = {cls: vars(cls)["from_pretrained"] for cls in readers}
    try:
        for cls, reader in readers.items():
            cls.from_pretrained = reader
        yield
    finally:
        for cls, reader in before.items():
            cls.from_pretrained = reader


def _if_here(read: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.device("cpu"):  # a processor may compute with real numbers while loading
        try:
            return read(*args, **{**kwargs, "local_files_only": True})
        except (OSError, ValueError):
            return _Absent()
