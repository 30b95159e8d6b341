"""Policies with names, shapes and dtypes, but without weights: on the meta device, without a download."""

import contextlib
import copy
import dataclasses
import io
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import WEIGHTS_FILE, checkpoint_sources

logger = logging.getLogger(__name__)

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
        made = cls.from_config(config)
        return made if torch_dtype is None else made.to(getattr(torch, torch_dtype))

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
