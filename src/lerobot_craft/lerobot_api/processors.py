"""Pre- and postprocessors of lerobot's policies: loading them, and what craft reads of them."""

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.features import input_shapes, token_shapes
from lerobot_craft.lerobot_api.pretrained import WRONG_SETTING, PolicyConfig, in_short

_PREPROCESSOR_FILE = "policy_preprocessor.json"
_POSTPROCESSOR_FILE = "policy_postprocessor.json"
_PROMPT_MASK = "observation.language.attention_mask"
# Policies, and those made from them, whose preprocessor needs the config's features and an instruction, and no more.
_READS_PLAIN_FRAMES = tuple(
    f"lerobot.policies.{name}." for name in ("act", "diffusion", "pi0", "pi05", "pi0_fast", "smolvla")
)
_QUOTED_SETTINGS = re.compile(r" with config: .*\. Error: ")  # a screenful in lerobot's message
_SHORTEST_WORD = 3  # letters: a shorter known word may have as many tokens as letters


class ProcessorStep(Protocol):
    """The part of lerobot's processor step that craft reads."""

    def get_config(self) -> dict[str, Any]:
        """The step's settings as JSON."""

    def state_dict(self) -> dict[str, Tensor]:
        """The step's tensors; for a normalizer, keyed `feature.stat`."""

    def load_state_dict(self, state: dict[str, Tensor], /) -> None:
        """Replace the step's tensors."""


class Processor(Protocol):
    """The part of lerobot's processor pipeline that craft reads."""

    steps: Sequence[ProcessorStep]

    def __call__(self, data: Any, /) -> Any:
        """Run every step on a batch (preprocessor) or an action (postprocessor)."""


def load_processors(
    config: PolicyConfig, rename_map: Mapping[str, str] | None = None, device: torch.device | None = None
) -> tuple[Processor, Processor]:
    """Pre- and postprocessor of `config.pretrained_path`, with the checkpoint's statistics.

    Args:
        config: The policy's config.
        rename_map: Dataset's feature name -> policy's name.
        device: Device of the preprocessor's batches; None: the config's.

    Raises:
        CraftError: The checkpoint has no processors, or a file or tokenizer cannot be loaded.
    """
    from lerobot.policies.factory import make_pre_post_processors

    directory = Path(config.pretrained_path or "")
    check_form(directory)
    with _plain_loading(directory):
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
    _check_use(config, directory, processors)
    return processors


@contextlib.contextmanager
def _plain_loading(directory: Path) -> Iterator[None]:
    """Errors of lerobot's loader as one sentence; their types depend on the setting that is wrong."""
    from lerobot.processor.pipeline import ProcessorMigrationError
    from safetensors import SafetensorError

    try:
        yield
    except ProcessorMigrationError as error:
        raise CraftError(f"The policy in {directory} is of an old lerobot; run: {error.migration_command}") from error
    except (ImportError, OSError, SafetensorError, *WRONG_SETTING) as error:
        reason = _QUOTED_SETTINGS.sub(": ", in_short(error)).rstrip(".")
        raise CraftError(
            f"The processors in {directory} cannot be loaded: {reason}. Copy the checkpoint again with all of its "
            "files; tokenizers that it names by path must be where the path says."
        ) from error


def train_processors(
    cfg: Any, policy: nn.Module, dataset_stats: Mapping[str, Mapping[str, Any]] | None, device: torch.device
) -> tuple[Processor, Processor]:
    """Pre- and postprocessor as `lerobot-train` makes them: statistics of the new data, features of the policy.

    In a resumed run they come from the checkpoint, including statistics.

    Args:
        cfg: lerobot's `TrainPipelineConfig`.
        policy: After `make_policy`, which sets its features.
        dataset_stats: `dataset.meta.stats`.
        device: accelerate's device.
    """
    from lerobot.policies.factory import make_pre_post_processors

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
    directory = None if cfg.policy.pretrained_path is None else Path(cfg.policy.pretrained_path)
    if directory is not None:
        check_form(directory)
    with contextlib.nullcontext() if directory is None else _plain_loading(directory):
        processors: tuple[Processor, Processor] = make_pre_post_processors(
            policy_cfg=cfg.policy,
            pretrained_path=cfg.policy.pretrained_path,
            pretrained_revision=getattr(cfg.policy, "pretrained_revision", None),
            **made,
        )
    if directory is not None:
        _check_use(config, directory, processors, made.get("dataset_stats"))
    return processors


def check_form(directory: Path) -> None:
    """Refuse processors that are valid JSON but not in lerobot's form, naming file and field.

    lerobot would raise a TypeError or fail at the first save. Missing files and invalid JSON are left to the loader.
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
    """Deviations from the form in which lerobot saves a processor."""
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
        elif not isinstance(step.get("registry_name", step.get("class")), str):
            yield f"steps[{number}] has no registry_name or class that names it"
        elif not isinstance(step.get("config", {}), dict):
            yield f"steps[{number}].config is {step['config']!r:.80}, not an object"
        elif not isinstance(step.get("state_file", ""), str):
            yield f"steps[{number}].state_file is {step['state_file']!r:.80}, not a file's name"


def _check_use(
    config: Any,
    directory: Path,
    processors: tuple[Processor, Processor],
    dataset_stats: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Refuse processors that lerobot loads and that this policy cannot use, by running them on a made frame.

    A lost tokenizer step would end in a KeyError within the policy's forward. A lost normalizer would be no error at
    all: the policy would see raw values. The preprocessor of a policy that is not in `_READS_PLAIN_FRAMES` may need
    what no made frame has, so only its normalizers are looked for.

    Args:
        config: The policy's config.
        directory: Its checkpoint.
        processors: Pre- and postprocessor.
        dataset_stats: Of the new dataset, if they replace those of the checkpoint.
    """
    file, then = directory / _PREPROCESSOR_FILE, directory / _POSTPROCESSOR_FILE
    for processor, place in zip(processors, (file, then), strict=True):
        for problem in _lost_normalizer(config, processor, place):
            raise CraftError(_unusable(place, problem))
    if not any(kind.__module__.startswith(_READS_PLAIN_FRAMES) for kind in type(config).__mro__):
        return
    try:
        made = _made_frame(config, processors[0], dataset_stats or {})
        batch = processors[0](made)
        lost = sorted(name for name in {**config.input_features, **token_shapes(config)} if batch.get(name) is None)
        if lost:
            raise CraftError(_unusable(file, f"no step of it gives the policy its {lost[0]}"))
        file = then
        action = made["action"].flatten(0, -2).to(config.device)
        executed = processors[1](action)
        if not isinstance(executed, Tensor) or executed.shape != action.shape:
            raise CraftError(_unusable(file, "it does not turn an action of the policy into one of the robot"))
    except WRONG_SETTING as error:
        raise CraftError(_unusable(file, f"its steps fail on a frame of this policy ({in_short(error)})")) from error


def _lost_normalizer(config: Any, processor: Processor, file: Path) -> Iterator[str]:
    """What a processor lacks to normalize as in the policy's training."""
    mapping = getattr(config, "normalization_mapping", None) or {}
    if all(mode == "IDENTITY" for mode in mapping.values()):
        return
    normalizers = [step for step in processor.steps if is_normalizer(step)]
    if not normalizers:
        yield "it has no step that normalizes, and the policy was trained with one"
    named = {step.get("state_file") for step in json.loads(file.read_bytes()).get("steps", [])}
    unread = sorted(path.name for path in file.parent.glob(f"{file.stem}_step_*.safetensors") if path.name not in named)
    if unread and not all(step.state_dict() for step in normalizers):
        yield f"none of its steps reads the statistics in {unread[0]}"


def _unusable(file: Path, problem: str) -> str:
    return (
        f"{file}: {problem}. The policy would not see or do what it learned. The file is damaged or was edited: copy "
        "the checkpoint again"
    )


def _made_frame(config: Any, preprocessor: Processor, dataset_stats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of one frame of zeros, under the names that the preprocessor renames to the policy's."""
    names = {new: old for step in preprocessor.steps for old, new in getattr(step, "rename_map", {}).items()}
    tokens, frame = token_shapes(config), {}
    for name, shape in input_shapes(config, None).items():
        size = shape.size
        known = np.shape(dataset_stats.get(name, {}).get("mean", 0))
        if len(known) == 1:
            size = (*size[:-1], *known)  # lerobot allows a vector of another length, and policies pad it
        if name not in tokens:
            frame[names.get(name, name)] = torch.zeros(1, *size, dtype=shape.dtype)
    return {**frame, "task": [""]}


def _preprocessor_overrides(
    config: PolicyConfig, saved: Mapping[str, Any], device: torch.device
) -> dict[str, dict[str, Any]]:
    """Replacements for saved settings; lerobot refuses overrides for absent steps."""
    present = {step.get("registry_name") for step in saved.get("steps", ())}
    overrides: dict[str, dict[str, Any]] = {}
    if "device_processor" in present:
        overrides["device_processor"] = {"device": device.type}
    if "action_tokenizer_processor" in present:
        # lerobot's step does not save these two, so a reload would request another tokenizer from the Hub.
        names = {"paligemma_tokenizer_name": "text_tokenizer_name", "fast_skip_tokens": "fast_skip_tokens"}
        overrides["action_tokenizer_processor"] = {
            argument: getattr(config, setting) for argument, setting in names.items() if hasattr(config, setting)
        }
    return overrides


def step_name(step: ProcessorStep) -> str:
    """The name under which lerobot saves a step: its registered name, or its class's full name."""
    kind = type(step)
    return getattr(kind, "_registry_name", None) or f"{kind.__module__}.{kind.__qualname__}"


def is_normalizer(step: ProcessorStep) -> bool:
    """Whether a step normalizes or unnormalizes with dataset statistics."""
    from lerobot.processor.normalize_processor import _NormalizationMixin

    return isinstance(step, _NormalizationMixin)


def normalization_modes(preprocessor: Processor) -> dict[str, str]:
    """Feature -> lerobot's `NormalizationMode` in the preprocessor, such as `MIN_MAX`."""
    modes = {}
    for step in filter(is_normalizer, preprocessor.steps):
        settings = step.get_config()
        chosen = settings.get("normalize_observation_keys")
        for name, feature in settings["features"].items():
            skipped = chosen is not None and feature["type"] != "ACTION" and name not in chosen
            modes[name] = "IDENTITY" if skipped else settings["norm_map"].get(feature["type"], "IDENTITY")
    return modes


def set_stats(processor: Processor, stats: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Make a loaded processor normalize with these statistics, feature -> statistic -> values.

    Works only on processors from `load_processors`: steps that got statistics in their constructor ignore it.
    """
    flat = {f"{name}.{stat}": values for name, known in stats.items() for stat, values in known.items()}
    for step in filter(is_normalizer, processor.steps):
        step.load_state_dict(flat)


def unknown_words(preprocessor: Processor, text: str) -> list[str]:
    """Words that the tokenizer spells byte by byte or maps to its unknown token; empty without a tokenizer."""
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
    """Number of tokens cut from the longest prompt of a batch, and the maximum length.

    The prompt combines instruction and state, so the whole preprocessor runs.
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
    """The policy's inputs for a data loader's batch, as in `lerobot-train`; `raw` is not modified."""
    batch = dict(raw)
    for key in camera_keys:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].to(dtype=torch.float32) / 255.0
    processed: dict[str, Any] = preprocessor(batch)
    return processed
