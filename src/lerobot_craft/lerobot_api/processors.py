"""Pre- and postprocessors of lerobot's policies: loading them, and what craft reads of them."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import PolicyConfig

_PREPROCESSOR_FILE = "policy_preprocessor.json"
_POSTPROCESSOR_FILE = "policy_postprocessor.json"
_PROMPT_MASK = "observation.language.attention_mask"
_SHORTEST_WORD = 3  # letters: a shorter word may be as many tokens as letters and still be known


class ProcessorStep(Protocol):
    """What craft reads of one step of lerobot's processors."""

    def get_config(self) -> dict[str, Any]:
        """The step's settings as JSON."""

    def state_dict(self) -> dict[str, Tensor]:
        """The step's tensors; for a normalizer `feature.stat`."""

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Replace them."""


class Processor(Protocol):
    """What craft reads of lerobot's processor pipelines."""

    steps: Sequence[ProcessorStep]

    def __call__(self, data: Any, /) -> Any:
        """Run every step on a batch (preprocessor) or an action (postprocessor)."""


def load_processors(
    config: PolicyConfig, rename_map: Mapping[str, str] | None = None, device: torch.device | None = None
) -> tuple[Processor, Processor]:
    """Pre- and postprocessor of `config.pretrained_path`, with the statistics the checkpoint ships.

    Args:
        config: The policy's.
        rename_map: What the data at hand are called differently, dataset's name -> policy's name.
        device: Where the preprocessor puts its batches; the config's when None.

    Raises:
        CraftError: The checkpoint has no processors, or one of their files or tokenizers cannot be loaded.
    """
    from lerobot.policies.factory import make_pre_post_processors
    from lerobot.processor.pipeline import ProcessorMigrationError
    from safetensors import SafetensorError

    directory = Path(config.pretrained_path or "")
    check_form(directory)
    try:
        saved = json.loads((directory / _PREPROCESSOR_FILE).read_text())
        overrides = _preprocessor_overrides(config, saved, device or torch.device(config.device))
        if rename_map:
            overrides["rename_observations_processor"] = {"rename_map": dict(rename_map)}
        processors: tuple[Processor, Processor] = make_pre_post_processors(
            config,
            pretrained_path=str(directory),
            pretrained_revision=config.pretrained_revision,
            preprocessor_overrides=overrides,
        )
    except ProcessorMigrationError as error:
        raise CraftError(f"The policy in {directory} is of an old lerobot; run: {error.migration_command}") from error
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise CraftError(
            f"The processors in {directory} cannot be loaded: {error}. Copy the checkpoint again with all of its "
            "files; tokenizers that it names by path must be where the path says."
        ) from error
    return processors


def train_processors(
    cfg: Any, policy: nn.Module, dataset_stats: Mapping[str, Mapping[str, Any]] | None, device: torch.device
) -> tuple[Processor, Processor]:
    """Pre- and postprocessor exactly as `lerobot-train` makes them: statistics of the new data, features of the policy.

    In a resumed run they come from the checkpoint, statistics included.

    Args:
        cfg: lerobot's `TrainPipelineConfig`.
        policy: After `make_policy`, which fills in its features.
        dataset_stats: `dataset.meta.stats`.
        device: accelerate's.
    """
    from lerobot.policies.factory import make_pre_post_processors

    if cfg.policy.pretrained_path is not None:
        check_form(Path(cfg.policy.pretrained_path))
    config: Any = policy.config
    stats = {} if cfg.resume else {"stats": dataset_stats}
    made: dict[str, Any] = {}
    if not (cfg.policy.pretrained_path and cfg.resume):
        made["dataset_stats"] = dataset_stats
    if cfg.policy.pretrained_path is not None:
        mapping = {"norm_map": config.normalization_mapping, **stats}
        before: dict[str, Any] = {
            "device_processor": {"device": device.type},
            "normalizer_processor": {"features": {**config.input_features, **config.output_features}, **mapping},
            "rename_observations_processor": {"rename_map": cfg.rename_map},
        }
        after: dict[str, Any] = {"unnormalizer_processor": {"features": config.output_features, **mapping}}
        if getattr(cfg.policy, "use_relative_actions", False):
            before["relative_actions_processor"] = {
                "enabled": True,
                "exclude_joints": getattr(cfg.policy, "relative_exclude_joints", []),
                "action_names": getattr(cfg.policy, "action_feature_names", None),
            }
            after["absolute_actions_processor"] = {"enabled": True}
        made |= {"preprocessor_overrides": before, "postprocessor_overrides": after}
    processors: tuple[Processor, Processor] = make_pre_post_processors(
        policy_cfg=cfg.policy,
        pretrained_path=cfg.policy.pretrained_path,
        pretrained_revision=getattr(cfg.policy, "pretrained_revision", None),
        **made,
    )
    return processors


def check_form(directory: Path) -> None:
    """Refuse processors that are JSON but not of lerobot's form, by file and field.

    lerobot fails on them with a TypeError or, where the name is none, at the first save, after training. A file that is
    missing or no JSON is for the loader to complain about.
    """
    for file in (directory / _PREPROCESSOR_FILE, directory / _POSTPROCESSOR_FILE):
        try:
            content = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        for problem in _form_problems(content):
            raise CraftError(
                f"{file}: {problem}, so lerobot cannot load or save this processor. The file is damaged or was edited: "
                "copy the checkpoint again"
            )


def _form_problems(content: object) -> Iterator[str]:
    """What is not of the form in which lerobot saves a processor."""
    if not isinstance(content, dict):
        yield "it holds no JSON object"
        return
    name, steps = content.get("name", "unnamed"), content.get("steps", [])
    if not isinstance(name, str) or not name:
        yield f"name is {name!r:.80}, not a text"
    if not isinstance(steps, list):
        yield f"steps is {steps!r:.80}, not a list"
        return
    for number, step in enumerate(steps):
        if not isinstance(step, dict):
            yield f"steps[{number}] is {step!r:.80}, not an object"
        elif not isinstance(step.get("config", {}), dict):
            yield f"steps[{number}].config is {step['config']!r:.80}, not an object"
        elif not isinstance(step.get("state_file", ""), str):
            yield f"steps[{number}].state_file is {step['state_file']!r:.80}, not a file's name"


def _preprocessor_overrides(
    config: PolicyConfig, saved: Mapping[str, Any], device: torch.device
) -> dict[str, dict[str, Any]]:
    """What must replace the saved settings; lerobot refuses an override for a step that is not there."""
    present = {step.get("registry_name") for step in saved.get("steps", ())}
    overrides: dict[str, dict[str, Any]] = {}
    if "device_processor" in present:
        overrides["device_processor"] = {"device": device.type}
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


def normalization_modes(preprocessor: Processor) -> dict[str, str]:
    """Feature -> lerobot's `NormalizationMode` under which the preprocessor normalizes it, such as `MIN_MAX`."""
    modes = {}
    for step in filter(is_normalizer, preprocessor.steps):
        settings = step.get_config()
        chosen = settings.get("normalize_observation_keys")
        for name, feature in settings["features"].items():
            skipped = chosen is not None and feature["type"] != "ACTION" and name not in chosen
            modes[name] = "IDENTITY" if skipped else settings["norm_map"].get(feature["type"], "IDENTITY")
    return modes


def set_stats(processor: Processor, stats: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Let a loaded processor normalize by these statistics, feature -> statistic -> values.

    Only for one of `load_processors`: lerobot's steps ignore this where statistics were given to their constructor.
    """
    flat = {f"{name}.{stat}": values for name, known in stats.items() for stat, values in known.items()}
    for step in filter(is_normalizer, processor.steps):
        step.load_state_dict(flat)


def unknown_words(preprocessor: Processor, text: str) -> list[str]:
    """Words of a text that the tokenizer does not know: it spells them byte by byte, or has its unknown token for them.

    Without a tokenizer there are none.
    """
    step = _tokenizer_step(preprocessor)
    if step is None:
        return []
    tokenizer, found = step.input_tokenizer, []
    for number, word in enumerate(text.split()):
        spoken = f" {word}" if number else word
        tokens = tokenizer(spoken, add_special_tokens=False)["input_ids"]
        spelled = len(word) >= _SHORTEST_WORD and len(tokens) >= len(word.encode())
        if spelled or (tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokens):
            found.append(word)
    return found


def tokens_cut_off(raw: Mapping[str, Any], camera_keys: Iterable[str], preprocessor: Processor) -> tuple[int, int]:
    """Tokens of the longest prompt of a batch that the policy does not get to read, and how many it reads at most.

    The prompt is what the policy makes of instruction and state, so the whole preprocessor runs.
    """
    step = _tokenizer_step(preprocessor)
    if step is None:
        return 0, 0
    truncation = step.truncation
    step.truncation = False
    try:
        mask = policy_batch(raw, camera_keys, preprocessor)[_PROMPT_MASK]
    finally:
        step.truncation = truncation
    return max(0, int(mask.sum(dim=1).max()) - step.max_length), step.max_length


def _tokenizer_step(preprocessor: Processor) -> Any | None:
    from lerobot.processor.tokenizer_processor import TokenizerProcessorStep

    return next((step for step in preprocessor.steps if isinstance(step, TokenizerProcessorStep)), None)


def policy_batch(raw: Mapping[str, Any], camera_keys: Iterable[str], preprocessor: Processor) -> dict[str, Any]:
    """What the policy sees of a data loader's batch, by the steps `lerobot-train` takes; `raw` stays as it is."""
    batch = dict(raw)
    for key in camera_keys:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].to(dtype=torch.float32) / 255.0
    processed: dict[str, Any] = preprocessor(batch)
    return processed
