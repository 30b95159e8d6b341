"""Pre- and postprocessors of lerobot's policies: loading them, and what craft reads of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import PolicyConfig

_PREPROCESSOR_FILE = "policy_preprocessor.json"


class ProcessorStep(Protocol):
    """What craft reads of one step of lerobot's processors."""

    def get_config(self) -> dict[str, Any]:
        """The step's settings as JSON."""

    def state_dict(self) -> dict[str, Tensor]:
        """The step's tensors; for a normalizer `feature.stat`."""


class Processor(Protocol):
    """What craft reads of lerobot's processor pipelines."""

    steps: Sequence[ProcessorStep]

    def __call__(self, data: Any, /) -> Any:
        """Run every step on a batch (preprocessor) or an action (postprocessor)."""


def load_processors(config: PolicyConfig) -> tuple[Processor, Processor]:
    """Pre- and postprocessor of `config.pretrained_path`, with the statistics the checkpoint ships.

    Raises:
        CraftError: The checkpoint has no processors, or one of their files or tokenizers cannot be loaded.
    """
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.processor.pipeline import ProcessorMigrationError
    from safetensors import SafetensorError

    directory = Path(config.pretrained_path or "")
    try:
        saved = json.loads((directory / _PREPROCESSOR_FILE).read_text())
        processors: tuple[Processor, Processor] = make_pre_post_processors(
            config,
            pretrained_path=str(directory),
            pretrained_revision=config.pretrained_revision,
            preprocessor_overrides=_preprocessor_overrides(config, saved),
        )
    except ProcessorMigrationError as error:
        raise CraftError(f"The policy in {directory} is of an old lerobot; run: {error.migration_command}") from error
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise CraftError(
            f"The processors in {directory} cannot be loaded: {error}. Copy the checkpoint again with all of its "
            "files; tokenizers that it names by path must be where the path says."
        ) from error
    return processors


def _preprocessor_overrides(config: PolicyConfig, saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What must replace the saved settings; lerobot refuses an override for a step that is not there."""
    present = {step.get("registry_name") for step in saved.get("steps", ())}
    overrides: dict[str, dict[str, Any]] = {}
    if "device_processor" in present:
        overrides["device_processor"] = {"device": torch.device(config.device).type}
    if "action_tokenizer_processor" in present:
        # lerobot's step does not save these two: a reload would ask the Hub for another tokenizer.
        names = {"paligemma_tokenizer_name": "text_tokenizer_name", "fast_skip_tokens": "fast_skip_tokens"}
        overrides["action_tokenizer_processor"] = {
            argument: getattr(config, setting) for argument, setting in names.items() if hasattr(config, setting)
        }
    return overrides


def step_name(step: ProcessorStep) -> str:
    """The name under which lerobot saves a step: its registered name, or where its class lives."""
    kind = type(step)
    return getattr(kind, "_registry_name", None) or f"{kind.__module__}.{kind.__qualname__}"


def is_normalizer(step: ProcessorStep) -> bool:
    """Whether a step normalizes or unnormalizes by dataset statistics."""
    from lerobot.processor.normalize_processor import _NormalizationMixin

    return isinstance(step, _NormalizationMixin)


def policy_batch(raw: Mapping[str, Any], camera_keys: Iterable[str], preprocessor: Processor) -> dict[str, Any]:
    """What the policy sees of a data loader's batch, by the steps `lerobot-train` takes; `raw` stays as it is."""
    batch = dict(raw)
    for key in camera_keys:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].to(dtype=torch.float32) / 255.0
    processed: dict[str, Any] = preprocessor(batch)
    return processed
