"""Checkpoint directories of small real policies, and small real LeRobotDatasets, made without a network."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors
from lerobot.utils.feature_utils import dataset_to_policy_features
from numpy.typing import ArrayLike
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import ordinary_priority, quiet_video
from lerobot_craft.tiny.pi import TinySizes
from lerobot_craft.tiny.recipes import RECIPES, Ingredients, Stats
from lerobot_craft.tiny.tokenizers import STATE_BINS

POLICY_TYPES = tuple(RECIPES)
_CHUNK_SIZE = 8
_STATE_IN_PROMPT = ("pi0_fast", "pi05")
_STATS_OF = {
    NormalizationMode.MEAN_STD: ("mean", "std"),
    NormalizationMode.MIN_MAX: ("min", "max"),
    NormalizationMode.QUANTILES: ("q01", "q99"),
    NormalizationMode.QUANTILE10: ("q10", "q90"),
}
_LOWEST, _HIGHEST = -1.0, 4.0  # octaves: from a quarter of a wave over the whole range to eight waves
_ACTION = "action"
# A dimension that hardly moves in the old data has a tiny spread, and huge values as soon as it moves in the new.
_STD_FLOOR = 1e-2
# Share of the range by which minimum and maximum are moved apart: pi0_fast cannot express values outside of it.
_MARGIN = 0.05
_MARGIN_FLOOR = 1e-3
_WIDENED = (("min", "max"), ("q01", "q99"), ("q10", "q90"))


def make_checkpoint(
    policy_type: str,
    directory: Path | str,
    *,
    input_features: dict[str, PolicyFeature],
    output_features: dict[str, PolicyFeature],
    dataset_stats: Stats,
    instructions: Iterable[str] = (),
    action_chunks: ArrayLike | None = None,
    sizes: TinySizes | None = None,
    seed: int = 0,
    **config_overrides: Any,
) -> Path:
    """Make a policy with random weights, its processors and its tokenizers, and save all as a checkpoint.

    `config.json` names the tokenizers in `directory/assets` by absolute path: they are lost if the directory moves.

    Args:
        policy_type: One of `POLICY_TYPES`. The pi family needs a camera; act and diffusion a camera or
            `observation.environment_state`, and with a camera they carry a ResNet-18 of 11 million parameters.
        directory: Where to save.
        input_features: Observations by name.
        output_features: The action.
        dataset_stats: Statistics that the processors normalise by: min and max for pi0_fast and diffusion, q01 and q99
            for pi05, mean and std for the others.
        instructions: Every instruction the policy will be given, of old tasks and new. Other words are spelled in bytes
            and may not fit into the prompt.
        action_chunks: Actions [N, H, A], not normalised, that pi0_fast's action tokenizer is fitted on.
        sizes: Sizes to build at; the defaults of `TinySizes` if None.
        seed: Seed of the weights. The caller's random state does not change.
        **config_overrides: Fields of the policy's configuration. `chunk_size` is the length of `action_chunks`, or 8;
            the device is the CPU.

    Returns:
        The directory.
    """
    if policy_type not in RECIPES:
        raise CraftError(f"There is no small {policy_type!r} policy; choose one of {', '.join(POLICY_TYPES)}.")
    directory = Path(directory).resolve()
    registered_name, recipe = RECIPES[policy_type]
    made_from = Ingredients(
        assets=directory / "assets",
        input_features=input_features,
        output_features=output_features,
        dataset_stats=dataset_stats,
        instructions=tuple(instructions),
        action_chunks=action_chunks,
        sizes=sizes or TinySizes(),
        chunk_size=_chunk_size(action_chunks, config_overrides),
        overrides=config_overrides,
    )
    settings = {
        "device": "cpu",
        "push_to_hub": False,
        "input_features": dict(input_features),
        "output_features": dict(output_features),
        **recipe(made_from),
        **config_overrides,
    }
    if policy_type == "diffusion":
        settings.pop("chunk_size", None)
    config = make_policy_config(registered_name, **settings)
    _require_stats(config, dataset_stats)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = get_policy_class(config.type)(config)
    if policy_type in _STATE_IN_PROMPT:
        tokenizer = AutoTokenizer.from_pretrained(config.text_tokenizer_name)
        smooth_numbers(_word_embedding(policy), tokenizer, torch.Generator().manual_seed(seed))
    for part in (policy, *make_pre_post_processors(config, dataset_stats=dataset_stats)):
        part.save_pretrained(directory)
    return directory


def _word_embedding(policy: Any) -> torch.Tensor:
    model = policy.model.paligemma_with_expert.paligemma.model.language_model
    embedding: torch.Tensor = model.get_input_embeddings().weight
    return embedding


def _chunk_size(action_chunks: ArrayLike | None, overrides: dict[str, Any]) -> int:
    asked = overrides.get("chunk_size", overrides.get("horizon"))
    if action_chunks is None:
        return int(asked or _CHUNK_SIZE)
    length = int(np.shape(action_chunks)[1])
    if asked not in (None, length):
        raise CraftError(f"chunk_size={asked}, but the action chunks have {length} steps: make them agree.")
    return length


def _require_stats(config: Any, dataset_stats: Stats) -> None:
    """Refuse missing statistics: lerobot's normaliser would skip them silently, or fail at the first batch."""
    for name, feature in {**config.input_features, **config.output_features}.items():
        # An image without statistics is used as it is, in lerobot's own examples too.
        if feature.type is FeatureType.VISUAL:
            continue
        mode = config.normalization_mapping.get(feature.type.value, NormalizationMode.IDENTITY)
        missing = [stat for stat in _STATS_OF.get(mode, ()) if stat not in dataset_stats.get(name, {})]
        if missing:
            raise CraftError(
                f"{config.type} normalises {name} by {mode.value}: give its {' and '.join(missing)} in dataset_stats."
            )


def smooth_numbers(embedding: torch.Tensor, tokenizer: PreTrainedTokenizerBase, generator: torch.Generator) -> None:
    """Overwrite the rows of ` 0` to ` 255` in an embedding [V, D] with sines and cosines, at the scale of the others.

    pi0_fast and pi05 write the state into the prompt as numbers from 0 to 255. A language model that has read text
    knows that 117 is next to 118. One with random weights would have to learn 256 words one by one from few
    demonstrations, and acts badly on numbers that it has not seen.

    Args:
        embedding: Changed in place.
        tokenizer: Its tokens are the rows; every number must be one token.
        generator: Draws the phases.
    """
    rows = [tokenizer.encode(f" {number}", add_special_tokens=False) for number in range(STATE_BINS)]
    if any(len(tokens) != 1 for tokens in rows):
        raise ValueError("a number from 0 to 255 is more than one token")
    half = embedding.shape[1] // 2
    number = torch.linspace(0, 1, STATE_BINS)[:, None]
    waves = math.pi * 2 ** torch.linspace(_LOWEST, _HIGHEST, half)[None]
    phase = 2 * math.pi * torch.rand(1, half, generator=generator)
    smooth = torch.cat([(waves * number + phase).sin(), (waves * number + phase).cos()], dim=1)
    smooth = torch.nn.functional.pad(smooth, (0, embedding.shape[1] - 2 * half))
    with torch.no_grad():
        embedding[[tokens[0] for tokens in rows]] = (2**0.5 * embedding.std() * smooth).to(embedding)


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
        action_chunks=chunks_of(dataset, chunk_size),
        sizes=sizes,
        seed=seed,
        **config_overrides,
    )


def safe_stats(stats: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same statistics with a lower bound on every standard deviation and a margin around every range."""
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


def chunks_of(dataset: Any, chunk_size: int) -> npt.NDArray[np.float32]:
    """The action chunk from each frame on, [N, H, A]; after the end of an episode its last action is repeated."""
    columns = dataset.hf_dataset.data  # the Arrow table itself: rows of `hf_dataset` come with their images decoded
    actions = np.asarray(columns.column(_ACTION).to_pylist(), dtype=np.float32)  # [N, A]
    episode = columns.column("episode_index").to_numpy()
    last = np.searchsorted(episode, episode, side="right") - 1  # [N], last row of each frame's episode
    rows = np.minimum(np.arange(len(actions))[:, None] + np.arange(chunk_size), last[:, None])  # [N, H]
    chunks: npt.NDArray[np.float32] = actions[rows]
    return chunks


FPS = 10


def make_local_dataset(
    root: Path,
    tasks: Mapping[str, int] | Sequence[str],
    episodes_per_task: int = 3,
    frames_per_episode: int = 12,
    cameras: Sequence[str] = ("observation.images.top",),
    image_size: int | tuple[int, int] = 32,
    state_dim: int = 4,
    action_dim: int = 4,
    seed: int = 0,
    video: bool = False,
    fps: int = FPS,
) -> Path:
    """Write a LeRobotDataset v3 to `root` (which must not exist yet) and return `root`.

    Actions are smooth in time and differ by task, the state follows them with a lag, and each image shows a square
    whose colour is the task and whose place is the time. The same arguments give the same values.

    Args:
        root: Where the dataset goes.
        tasks: Instructions; a mapping gives each its own number of episodes. Tasks alternate, episode by episode.
        episodes_per_task: Episodes of each task if `tasks` is no mapping.
        frames_per_episode: Length of the first episode; every later episode is one frame longer or shorter by turns.
        cameras: Image features.
        image_size: Height and width in pixels; one number for both.
        state_dim: Size of `observation.state`.
        action_dim: Size of `action`.
        seed: Seed of starting states and episode noise.
        video: Store images as videos (slower to write, and lossy).
        fps: Frames per second.
    """
    quiet_video()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    image = {
        "dtype": "video" if video else "image",
        "shape": (*size, 3),
        "names": ["height", "width", "channels"],
    }
    features = {
        **{camera: dict(image) for camera in cameras},
        "observation.state": _vector("state", state_dim),
        "action": _vector("action", action_dim),
    }
    dataset = LeRobotDataset.create(f"local/{root.name}", fps=fps, features=features, root=root, use_videos=video)
    rng = np.random.default_rng(seed)
    for number, (task_number, task) in enumerate(_episode_order(tasks, episodes_per_task)):
        length = frames_per_episode + (0, 1, -1)[number % 3]
        states, actions = _movement(rng, task_number, length, state_dim, action_dim)
        for frame in range(length):
            pictures = {
                camera: _picture(size, task_number, camera_number, frame / length)
                for camera_number, camera in enumerate(cameras)
            }
            dataset.add_frame({**pictures, "observation.state": states[frame], "action": actions[frame], "task": task})
        with ordinary_priority():
            dataset.save_episode(parallel_encoding=False)
    with ordinary_priority():
        dataset.finalize()
    return root


def _vector(name: str, size: int) -> dict[str, object]:
    return {"dtype": "float32", "shape": (size,), "names": [f"{name}_{i}" for i in range(size)]}


def _episode_order(tasks: Mapping[str, int] | Sequence[str], episodes_per_task: int) -> list[tuple[int, str]]:
    counts = dict(tasks) if isinstance(tasks, Mapping) else dict.fromkeys(tasks, episodes_per_task)
    return [
        (number, task)
        for turn in range(max(counts.values()))
        for number, (task, count) in enumerate(counts.items())
        if turn < count
    ]


def _movement(
    rng: np.random.Generator, task_number: int, length: int, state_dim: int, action_dim: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """A swing whose frequency is the task's: states [T, S] follow actions [T, A] with a lag."""
    time = np.linspace(0.0, 1.0, length)[:, None]
    start = rng.uniform(-0.5, 0.5)
    frequency = 0.5 + 0.5 * task_number

    def swing(dimensions: int, lag: float) -> npt.NDArray[Any]:
        phase = np.arange(dimensions)[None] * 0.7
        return (np.sin(2 * np.pi * frequency * (time - lag) + phase) + start).astype(np.float32)

    return swing(state_dim, 0.1), swing(action_dim, 0.0)


def _picture(size: tuple[int, int], task_number: int, camera_number: int, phase: float) -> npt.NDArray[Any]:
    """A grey field [H, W, 3] with a square: its colour says the task, its place the time."""
    height, width = size
    picture = np.full((height, width, 3), 40 + 30 * camera_number, dtype=np.uint8)
    side = max(2, min(size) // 4)
    left = int(phase * (width - side))
    top = (height - side) // 2
    colour = [(90 * (task_number + 1) + 70 * channel) % 256 for channel in range(3)]
    picture[top : top + side, left : left + side] = colour
    return picture
