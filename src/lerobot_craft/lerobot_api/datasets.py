"""The dataset side of lerobot: opening and listing, and frames that are stored elsewhere but read like a dataset's.

lerobot is not imported at the top, because that takes ten seconds and more.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import Dataset

from lerobot_craft.errors import CraftError, setting
from lerobot_craft.lerobot_api import quiet_video

if TYPE_CHECKING:
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
    from lerobot.datasets.lerobot_dataset import LeRobotDataset


@dataclass(frozen=True)
class FrameTable:
    """Task, episode and position of every frame in an opened dataset: row i is the frame `dataset[i]`."""

    task: npt.NDArray[np.int64]  # index into the dataset's instructions
    episode: npt.NDArray[np.int64]
    position: npt.NDArray[np.int64]  # frames since the episode started
    length: npt.NDArray[np.int64]  # length of the frame's episode

    def __len__(self) -> int:
        return len(self.task)

    def take(self, rows: npt.NDArray[np.int64]) -> "FrameTable":
        """Only these rows, in this order."""
        return FrameTable(self.task[rows], self.episode[rows], self.position[rows], self.length[rows])


@dataclass(frozen=True)
class StoredMeta:
    """The part of a dataset's metadata that readers of frames use.

    Attributes:
        repo_id: A name for messages.
        features: As in lerobot's `info.json`: dtype and shape of each; images are [height, width, channels].
        instructions: A frame's task index refers to this list.
        camera_keys: Features that are color images.
    """

    repo_id: str
    features: Mapping[str, Mapping[str, Any]]
    instructions: Sequence[str]
    camera_keys: Sequence[str]
    depth_keys: Sequence[str] = ()
    video_keys: Sequence[str] = ()
    has_language_columns: bool = field(default=False, init=False)


class StoredFrames(Dataset[dict[str, Any]]):
    """Single frames that include their history and action chunk; images are uint8.

    A subclass has `meta` and `table`; row i of the table is the frame `self[i]`.
    """

    meta: StoredMeta
    table: FrameTable

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """One frame for lerobot's DataLoader: tensors, and `task`."""
        raise NotImplementedError

    def numbers(self, name: str) -> Tensor:
        """A feature [N, ...] at each frame's own time, without history."""
        raise NotImplementedError


type RawBatch = dict[str, Any]  # tensors [B, ...] and lists of B strings, as from lerobot's DataLoader

_SUCCESS = "next.success"
_REVISION = re.compile(r"\w[\w./-]*")


def open_dataset(
    repo_id: str,
    root: str | Path | None = None,
    revision: str | None = None,
    *,
    policy_config: "PreTrainedConfig | None" = None,
    episodes: Sequence[int] | None = None,
    named: str = "dataset",
) -> "LeRobotDataset":
    """Open a LeRobotDataset with the samples that `lerobot-train` would see, without image transforms.

    Args:
        repo_id: The dataset's name, such as `lerobot/pusht`.
        root: Its directory on this machine. If given, the dataset must be there: nothing is downloaded.
        revision: Branch, tag or commit on the Hub.
        policy_config: Determines which past observations and future actions belong to a sample.
        episodes: Only these; None: all.
        named: The setting that names it, for errors.

    Raises:
        CraftError: The dataset is missing, incomplete or unreadable.
    """
    quiet_video()
    from lerobot.datasets.factory import resolve_delta_timestamps
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    chosen = None if episodes is None else sorted(set(episodes))
    with _plain_errors(repo_id, root, named):
        meta = open_metadata(repo_id, root, revision, named=named)
        _check_episodes(meta, chosen)
        if root is not None:
            _check_files(meta, chosen, named)
        deltas = None if policy_config is None else resolve_delta_timestamps(policy_config, meta)
        return LeRobotDataset(
            repo_id, root=root, revision=revision, episodes=chosen, delta_timestamps=deltas, return_uint8=True
        )


def open_metadata(
    repo_id: str, root: str | Path | None = None, revision: str | None = None, *, named: str = "dataset"
) -> "LeRobotDatasetMetadata":
    """A dataset's metadata (instructions, features, statistics), without its frames."""
    quiet_video()
    from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata

    if root is not None:
        require_metadata(repo_id, Path(root), named)
    with _plain_errors(repo_id, root, named):
        return LeRobotDatasetMetadata(repo_id, root=root, revision=revision)


def require_metadata(repo_id: str, root: Path, named: str = "dataset") -> None:
    """Refuse a directory with missing files in meta/: lerobot would ask the Hub for them and blame the network."""
    if not (root / "meta" / "info.json").is_file():
        flag = setting(f"{named}.root")
        raise CraftError(
            f"There is no LeRobotDataset in {root}: it has no meta/info.json. Give the directory that holds meta/ and"
            f" data/ as {flag}, or leave {flag} out to load {repo_id} from the Hub."
        )
    _check_recorded(root, named)
    found = {"meta/tasks.parquet": (root / "meta" / "tasks.parquet").is_file()}
    found["meta/episodes/"] = any((root / "meta" / "episodes").rglob("*.parquet"))
    for name, is_there in found.items():
        if not is_there:
            raise CraftError(
                f"The dataset in {root} is incomplete: {name} is missing, without which frames have no instruction. "
                f"Copy it again, or give another directory as {setting(f'{named}.root')}."
            )


def _check_recorded(root: Path, named: str) -> None:
    """Refuse a dataset that was created and never recorded into; other files of meta/ are not there yet then."""
    with suppress(OSError, ValueError, AttributeError):  # a damaged file is left to lerobot's error
        if json.loads((root / "meta" / "info.json").read_bytes()).get("total_episodes") == 0:
            raise CraftError(
                f"The dataset in {root} has no episode: it was created, and nothing was saved into it. Record "
                f"episodes, or give another directory as {setting(f'{named}.root')}."
            )


@contextmanager
def _plain_errors(repo_id: str, root: str | Path | None, named: str) -> Iterator[None]:
    """Turn errors into CraftErrors, and keep lerobot off the Hub if `root` is given."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with nullcontext() if root is None else _no_hub():
            yield
    except CraftError:
        raise
    except Exception as error:  # parquet, JSON, video and network code raise many types
        if root is not None and isinstance(error, OfflineModeIsEnabled):
            raise CraftError(
                f"The dataset in {root} is incomplete: files of its meta/ are missing. Copy it again, or give another "
                f"directory as {setting(f'{named}.root')}."
            ) from error
        reason = next(iter(str(error).strip().splitlines()), "")
        raise CraftError(
            f"The dataset {repo_id} cannot be read from {root or 'the Hub or its local copy'}"
            f" ({type(error).__name__}: {reason}). If it is on this machine, give its directory as "
            f"{setting(f'{named}.root')}."
        ) from error


@contextmanager
def _no_hub() -> Iterator[None]:
    """Keep lerobot from downloading files that a local directory lacks."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _check_episodes(meta: "LeRobotDatasetMetadata", episodes: list[int] | None) -> None:
    if meta.total_frames == 0:
        raise CraftError(f"The dataset {meta.repo_id} has no frames. Record or choose another one.")
    if episodes is None:
        return
    absent = [episode for episode in episodes if not 0 <= episode < meta.total_episodes]
    if absent or not episodes:
        asked = f"not {absent[0]}" if absent else "none was chosen"
        raise CraftError(
            f"The dataset {meta.repo_id} has episodes 0 to {meta.total_episodes - 1}, {asked}. Mend "
            f"{setting('dataset.episodes')}."
        )


def _check_files(meta: "LeRobotDatasetMetadata", episodes: list[int] | None, named: str) -> None:
    """Refuse an incomplete directory, which lerobot would otherwise try to complete from the Hub."""
    files = set()
    for episode in range(meta.total_episodes) if episodes is None else episodes:
        files.add(meta.get_data_file_path(episode))
        files.update(meta.get_video_file_path(episode, key) for key in meta.video_keys)
    missing = sorted(str(file) for file in files if not (meta.root / file).is_file())
    if missing:
        raise CraftError(
            f"The dataset in {meta.root} is incomplete: {missing[0]} is missing"
            + (f", and {len(missing) - 1} more files." if len(missing) > 1 else ".")
            + f" Copy it again, or give another directory as {setting(f'{named}.root')}."
        )


def frame_table(dataset: "LeRobotDataset | StoredFrames") -> FrameTable:
    """The dataset's frames as arrays, without decoding images or videos."""
    if isinstance(dataset, StoredFrames):
        return dataset.table
    # The Arrow table, because rows of `hf_dataset` come with decoded images.
    columns = dataset.hf_dataset.data
    task, episode, position = (
        columns.column(name).to_numpy().astype(np.int64) for name in ("task_index", "episode_index", "frame_index")
    )
    lengths = np.asarray(dataset.meta.episodes["length"], dtype=np.int64)
    listed = {"task_index": (task, "tasks.parquet", len(instructions(dataset.meta)))}
    listed["episode_index"] = (episode, "episodes/", len(lengths))
    for name, (index, file, count) in listed.items():
        if (lost := np.flatnonzero((index < 0) | (index >= count))).size:
            row = int(lost[0])
            raise CraftError(
                f"In {dataset.repo_id} frame {position[row]} of episode {episode[row]} has {name} {index[row]}, and "
                f"meta/{file} lists {count} (0 to {count - 1}). The metadata and the data are not of one dataset: "
                "copy it again, or give another directory."
            )
    return FrameTable(task=task, episode=episode, position=position, length=lengths[episode])


def instructions(dataset_meta: "LeRobotDatasetMetadata | StoredMeta") -> list[str]:
    """The dataset's instructions; a frame's task index refers to this list."""
    if isinstance(dataset_meta, StoredMeta):
        return list(dataset_meta.instructions)
    return [] if dataset_meta.tasks is None else [str(task) for task in dataset_meta.tasks.index]


def open_instructions(dataset: "LeRobotDataset") -> list[str]:
    """The instructions of the episodes that are open, which `--dataset.episodes` may have narrowed down."""
    listed = instructions(dataset.meta)
    if getattr(dataset, "episodes", None) is None:
        return listed
    used = np.unique(dataset.hf_dataset.data.column("task_index").to_numpy())
    return [listed[task] for task in used]


def frame_numbers(dataset: "LeRobotDataset") -> npt.NDArray[np.int64]:
    """Each row's frame number in the whole dataset [N], even if only some episodes are open."""
    numbers: npt.NDArray[np.int64] = dataset.hf_dataset.data.column("index").to_numpy().astype(np.int64)
    return numbers


def records_success(dataset: "LeRobotDataset") -> bool:
    """Whether the dataset says which episodes succeeded: recorded evaluations do, demonstrations do not."""
    return _SUCCESS in dataset.meta.features


def frame_success(dataset: "LeRobotDataset") -> npt.NDArray[np.int8]:
    """Whether each frame's episode succeeded [N]: 1, 0, or -1 if unknown.

    Only `lerobot-eval --eval.recording=true` writes `next.success`, true at the frame that reached the goal.
    """
    columns = dataset.hf_dataset.data
    if not records_success(dataset):
        return np.full(len(columns), -1, dtype=np.int8)
    episode = columns.column("episode_index").to_numpy().astype(np.int64)
    reached = np.asarray([bool(np.any(value)) for value in columns.column(_SUCCESS).to_pylist()])
    return np.isin(episode, episode[reached]).astype(np.int8)


def dataset_fingerprint(dataset: "LeRobotDataset") -> str:
    """SHA-256 of a dataset's metadata; the same for a copy elsewhere.

    It covers info.json, the instructions, each episode's length and instructions, and the statistics, which change with
    any value of the data. Statistics are read from the file, because lerobot overwrites those in memory.
    """
    return _fingerprint(dataset.meta)


def fingerprint_in(
    repo_id: str, root: str | Path | None, revision: str | None = None, *, named: str = "dataset"
) -> str:
    """The `dataset_fingerprint` from metadata only, without opening frames.

    Raises:
        CraftError: The dataset is missing or unreadable.
    """
    meta = open_metadata(repo_id, root, revision, named=named)
    with _plain_errors(repo_id, root, named):
        return _fingerprint(meta)


def _fingerprint(meta: "LeRobotDatasetMetadata") -> str:
    folder = Path(meta.root) / "meta"
    stats = folder / "stats.json"
    content = {
        "info": json.loads((folder / "info.json").read_text(encoding="utf-8")),
        "instructions": instructions(meta),
        "episode_lengths": list(meta.episodes["length"]),
        "episode_instructions": list(meta.episodes["tasks"]),
        "stats": json.loads(stats.read_text(encoding="utf-8")) if stats.is_file() else None,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def local_copies(repo_id: str, revision: str | None = None) -> list[Path]:
    """Local directories that may contain a Hub dataset; no network access.

    First lerobot's datasets by name, then its download cache and that of `hf download`.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError
    from lerobot.datasets.dataset_metadata import CODEBASE_VERSION
    from lerobot.utils.constants import HF_LEROBOT_HUB_CACHE

    # The revision becomes part of a path, so one that leads elsewhere is dropped.
    asked = [revision] if revision and _REVISION.fullmatch(revision) and ".." not in revision else []
    places = [lerobot_home() / repo_id]
    for cache in (HF_LEROBOT_HUB_CACHE, None):
        for version in dict.fromkeys([*asked, CODEBASE_VERSION, "main"]):
            with suppress(OSError, HFValidationError):  # not there, or an invalid name
                found = snapshot_download(
                    repo_id,
                    repo_type="dataset",
                    revision=version,
                    cache_dir=cache,
                    allow_patterns="meta/*",  # must be complete; data are checked on opening
                    local_files_only=True,
                )
                places.append(Path(found))
    return [place for place in dict.fromkeys(places) if (place / "meta" / "info.json").is_file()]


def lerobot_home() -> Path:
    """Where lerobot stores datasets on this machine: `$HF_LEROBOT_HOME` or its default."""
    from lerobot.utils.constants import HF_LEROBOT_HOME

    return Path(HF_LEROBOT_HOME)
