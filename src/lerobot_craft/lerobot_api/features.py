"""Does a dataset have what a policy reads, and in which shapes? lerobot checks only cameras, and not all of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lerobot_craft.errors import CraftError

_CAMERAS = ("image", "video")
_VECTORS = ("STATE", "ENV", "ACTION")
# Feature -> the setting that holds the padded width of a multi-robot policy.
_PADDED_TO = {"observation.state": "max_state_dim", "action": "max_action_dim"}


def require_features(
    config: Any,
    present: Mapping[str, Mapping[str, Any]],
    *,
    dataset: str,
    masks_missing_cameras: bool,
    rename_map: Mapping[str, str] | None = None,
    actions: bool = False,
) -> list[str]:
    """Refuse a dataset that lacks the policy's features, or whose state or action has another shape.

    Args:
        config: The policy's config from the checkpoint: lerobot's `make_policy` overwrites its output features.
        present: `dataset.meta.features`.
        dataset: Its name, for the message.
        masks_missing_cameras: Whether the policy can run without some of its cameras (see `PolicyAdapter`).
        rename_map: lerobot's `--rename_map`, dataset's name -> policy's name; None if the command has no such flag.
        actions: Whether demonstrated actions are also needed.

    Returns:
        Cameras that the dataset lacks and the policy masks.

    Raises:
        CraftError: Something is missing or does not fit.
    """
    # lerobot's renaming step only renames observations.
    names = {old: new for old, new in (rename_map or {}).items() if old.startswith("observation.")}
    named = {names.get(name, name): feature for name, feature in present.items()}
    wanted = {name: feature for name, feature in config.input_features.items() if "empty_camera" not in name}
    if actions:
        wanted |= config.output_features
    missing = [name for name in wanted if name not in named]
    cameras = [name for name, feature in wanted.items() if feature.type.value == "VISUAL"]
    if missing and not (masks_missing_cameras and set(missing) < set(cameras)):
        raise CraftError(
            f"the dataset {dataset} has no {', '.join(missing)}, which this {config.type} reads (it has "
            f"{', '.join(name for name in present if _is_data(name))}): {_remedy(missing, named, wanted, rename_map)}"
        )
    misfits = [
        f"{name} has shape {list(named[name]['shape'])} instead of {list(feature.shape)}"
        for name, feature in wanted.items()
        if name in named and feature.type.value in _VECTORS and not _fits(config, name, feature, named[name])
    ]
    if misfits:
        raise CraftError(
            f"the dataset {dataset} is of another robot than this {config.type}: {'; '.join(misfits)}. Use a dataset "
            "of the robot that the policy was trained on, or a policy of this one."
        )
    return missing


def cameras_of(config: Any) -> list[str]:
    """The cameras that a policy reads."""
    return [name for name, feature in config.input_features.items() if feature.type.value == "VISUAL"]


def unread_cameras(
    config: Any, present: Mapping[str, Mapping[str, Any]], rename_map: Mapping[str, str] | None = None
) -> list[str]:
    """Cameras of a dataset (`dataset.meta.features`) that a policy does not read, with the dataset's names."""
    names, read = rename_map or {}, cameras_of(config)
    cameras = [name for name, feature in present.items() if feature["dtype"] in _CAMERAS]
    return [name for name in cameras if names.get(name, name) not in read]


def dimension_names(
    present: Mapping[str, Mapping[str, Any]], rename_map: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Names of a dataset's vector dimensions (`dataset.meta.features`), by the policy's feature names."""
    found = {}
    for name, feature in present.items():
        names = feature.get("names")
        if isinstance(names, Mapping):  # {"motors": [...]}, as in converted datasets
            names = next(iter(names.values()), None)
        if isinstance(names, list | tuple) and (len(names),) == tuple(feature["shape"]):
            found[(rename_map or {}).get(name, name)] = [str(each) for each in names]
    return found


def _is_data(name: str) -> bool:
    return name == "action" or name.startswith("observation.")


def _fits(config: Any, name: str, wanted: Any, present: Mapping[str, Any]) -> bool:
    if tuple(present["shape"]) == tuple(wanted.shape):
        return True
    padded = getattr(config, _PADDED_TO.get(name, ""), None)
    # A policy that declares the padded width is not tied to one robot: it accepts narrower features.
    return tuple(wanted.shape) == (padded,) and len(present["shape"]) == 1 and present["shape"][0] <= padded


def _remedy(
    missing: Sequence[str], named: Mapping[str, Any], wanted: Mapping[str, Any], rename_map: Mapping[str, str] | None
) -> str:
    observations = [name for name in missing if name.startswith("observation.")]
    if rename_map is None or not observations:
        return "use a dataset that has them under these names"
    spare = [name for name in named if name.startswith("observation.") and name not in wanted]
    alike = [name for name in spare if _is_camera(name) == _is_camera(observations[0])]
    example = alike[0] if alike else "NAME_IN_THE_DATASET"
    return f"""name them with --rename_map='{{"{example}": "{observations[0]}"}}', or use a dataset that has them"""


def _is_camera(name: str) -> bool:
    return name.startswith("observation.image")


class Shape(NamedTuple):
    """Shape and dtype of one sample."""

    size: tuple[int, ...]
    dtype: torch.dtype


def input_shapes(
    config: Any, dataset_meta: Any | None, rename_map: Mapping[str, str] | None = None
) -> dict[str, Shape]:
    """Every tensor of a preprocessed sample, by name.

    Images have the dataset's size. A prompt has the policy's maximum length.

    Args:
        config: lerobot's policy config with its features.
        dataset_meta: The dataset's metadata; None: shapes from the config.
        rename_map: The dataset's names -> the policy's.
    """
    found = {name: tuple(feature.shape) for name, feature in (config.input_features | config.output_features).items()}
    if dataset_meta is not None:
        present = _present(dataset_meta, rename_map or {})
        found = {name: present[name] for name in found if name in present}
    shapes: dict[str, Shape] = {}
    for name, size in found.items():
        steps = config.action_delta_indices if name in config.output_features else config.observation_delta_indices
        shapes[name] = Shape(size if steps is None else (len(steps), *size), torch.float32)
        if steps is not None:
            shapes[f"{name}_is_pad"] = Shape((len(steps),), torch.bool)
    return shapes | token_shapes(config)


def _present(dataset_meta: Any, rename_map: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    from lerobot.utils.feature_utils import dataset_to_policy_features

    features = dataset_to_policy_features(dataset_meta.features)
    return {rename_map.get(name, name): tuple(feature.shape) for name, feature in features.items()}


def token_shapes(config: Any) -> dict[str, Shape]:
    """What steps of the preprocessor add to a sample: tokens of the prompt and of the actions, and their masks."""
    from lerobot.utils.constants import (
        ACTION_TOKEN_MASK,
        ACTION_TOKENS,
        OBS_LANGUAGE_ATTENTION_MASK,
        OBS_LANGUAGE_TOKENS,
    )

    shapes: dict[str, Shape] = {}
    lengths = {
        (OBS_LANGUAGE_TOKENS, OBS_LANGUAGE_ATTENTION_MASK): getattr(config, "tokenizer_max_length", None),
        (ACTION_TOKENS, ACTION_TOKEN_MASK): getattr(config, "max_action_tokens", None),
    }
    for (tokens, mask), length in lengths.items():
        if length is not None:
            shapes |= {tokens: Shape((length,), torch.long), mask: Shape((length,), torch.bool)}
    return shapes


def frame_bytes(config: Any) -> tuple[int, int]:
    """Bytes of a frame as a policy reads it: its images, a byte per value, and its state and actions in float32."""
    pixels = sum(math.prod(feature.shape) for feature in config.image_features.values())
    steps = len(config.action_delta_indices or [0])
    actions = sum(math.prod(feature.shape) for feature in config.output_features.values())
    state = sum(math.prod(f.shape) for name, f in config.input_features.items() if name not in config.image_features)
    return pixels, 4 * (state + steps * actions)
