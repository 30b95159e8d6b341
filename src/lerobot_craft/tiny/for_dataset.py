"""A small policy that fits a dataset: its features, its statistics (made safe to divide by) and its action chunks."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lerobot.utils.feature_utils import dataset_to_policy_features

from lerobot_craft.tiny.checkpoints import make_checkpoint
from lerobot_craft.tiny.sizes import TinySizes

_ACTION = "action"
# A dimension that hardly moves in the old data would be blown up by its own tiny spread as soon as it moves in the new.
_STD_FLOOR = 1e-2
# Share of its range by which minimum and maximum are moved apart: pi0_fast cannot say what lies outside of them.
_MARGIN = 0.05
_MARGIN_FLOOR = 1e-3
_WIDENED = (("min", "max"), ("q01", "q99"), ("q10", "q90"))


def make_checkpoint_for(
    policy_type: str,
    directory: Path | str,
    dataset: Any,
    *,
    instructions: Iterable[str],
    chunk_size: int,
    sizes: TinySizes | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Make a policy with random weights for the robot of a dataset; see `make_checkpoint`.

    Args:
        policy_type: As for `make_checkpoint`.
        directory: Where to save.
        dataset: A LeRobotDataset; its statistics become the policy's, see `safe_stats`.
        instructions: Every instruction the policy will be given, of later tasks too.
        chunk_size: Actions per chunk.
        sizes: Sizes to build at.
        seed: Of the weights.
        **config_overrides: Fields of the policy's configuration.

    Returns:
        The directory.
    """
    features = dataset_to_policy_features(dataset.meta.features)
    return make_checkpoint(
        policy_type,
        directory,
        input_features={name: feature for name, feature in features.items() if name != _ACTION},
        output_features={_ACTION: features[_ACTION]},
        dataset_stats=safe_stats(dataset.meta.stats),
        instructions=instructions,
        action_chunks=action_chunks(dataset, chunk_size),
        sizes=sizes,
        seed=seed,
        **config_overrides,
    )


def safe_stats(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same statistics with a floor under every standard deviation and a margin around every range."""
    return {name: _safe(values) for name, values in stats.items()}


def _safe(values: Mapping[str, Any]) -> dict[str, Any]:
    safe = dict(values)
    if "std" in safe:
        safe["std"] = np.maximum(np.asarray(safe["std"], dtype=np.float32), _STD_FLOOR)
    for low, high in _WIDENED:
        if low in safe and high in safe:
            bottom, top = (np.asarray(safe[key], dtype=np.float32) for key in (low, high))
            margin = _MARGIN * (top - bottom) + _MARGIN_FLOOR
            safe[low], safe[high] = bottom - margin, top + margin
    return safe


def action_chunks(dataset: Any, chunk_size: int) -> npt.NDArray[np.float32]:
    """The chunk that begins at each frame, [N, H, A]; after the end of an episode its last action is repeated."""
    columns = dataset.hf_dataset.data  # the Arrow table itself: rows of `hf_dataset` come with their images decoded
    actions = np.asarray(columns.column(_ACTION).to_pylist(), dtype=np.float32)  # [N, A]
    episode = columns.column("episode_index").to_numpy()
    last = np.searchsorted(episode, episode, side="right") - 1  # [N], row of the last frame of each frame's episode
    rows = np.minimum(np.arange(len(actions))[:, None] + np.arange(chunk_size), last[:, None])  # [N, H]
    chunks: npt.NDArray[np.float32] = actions[rows]
    return chunks
