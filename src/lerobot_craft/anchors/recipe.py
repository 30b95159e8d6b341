"""The configuration of a cache, and the recipe that identifies its content.

Two builds with the same recipe give the same bytes, on any machine and after any number of interruptions.

The defaults of the original CRaFT notes apply if a flag asks for hidden states.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.retained import MULTI_LAYER, Retained, mode_named
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import PolicyAdapter

_SEVERAL = "-2,-1"
# Token policies answer the same at every visit of an anchor and overfit to a few, so they need more anchors; other
# policies are asked under several noise draws (decision 0017).
_ANCHORS, _ANCHORS_OF_TOKENS = 2000, 8000
# For the same reason a few old frames do not fill half of a token policy's batches: visits per old frame, per visit of
# a cross anchor.
_VISITS_OF_TOKENS = 8
_AUTO = "auto"
DRAW_FROM = (_AUTO, "old_frames", "statistics")


@dataclass
class DatasetFlags:
    """One or several datasets, separated by commas."""

    # Names, such as lerobot/pusht.
    repo_id: str = ""
    # Their directories on this machine, in the same order. Without them they are looked up as lerobot does.
    root: str = ""
    # Branch, tag or commit on the Hub.
    revision: str | None = None

    def addresses(self, flag: str) -> list[tuple[str, str | None]]:
        """(repo_id, root) of each dataset."""
        names = [name.strip() for name in self.repo_id.split(",") if name.strip()]
        roots: list[str | None] = [root.strip() for root in self.root.split(",") if root.strip()]
        if roots and len(roots) != len(names):
            raise CraftError(
                f"--{flag}.repo_id names {len(names)} datasets and --{flag}.root {len(roots)} directories: "
                "give one directory for each, in the same order, separated by commas"
            )
        return list(zip(names, roots or [None] * len(names), strict=True))


def resolve_source(asked: str, *, old: bool, new: bool) -> str:
    """Resolve `auto`: use old frames if there are any, and new frames under old instructions if there are any."""
    if asked != _AUTO:
        return asked
    if not new:
        return "dataset"
    return "both" if old else "cross"


def num_anchors(asked: int | None, old_frames: int | None, adapter: PolicyAdapter) -> int:
    """Number of anchors: as asked for, or (None) the policy's default plus `old_frames`."""
    if asked is not None:
        return asked
    return (_ANCHORS_OF_TOKENS if adapter.output_kind == "logits" else _ANCHORS) + (old_frames or 0)


def num_draws(asked: int | None, visits: int, anchors: int) -> int:
    """Draws per anchor: as asked for, or (None) one for every two visits that training makes."""
    return asked or min(BuildConfig.num_draws, max(1, visits // (2 * anchors)))


def most_visits(adapter: PolicyAdapter) -> float | None:
    """How often a rare anchor may be visited, relative to the others; None: no limit."""
    return _VISITS_OF_TOKENS if adapter.output_kind == "logits" else None


def draws_from_old(asked: str, source: str, adapter: PolicyAdapter) -> bool:
    """Whether drawn states come from old frames instead of the statistics.

    The default is True for token policies if there are old frames (decision 0029).
    """
    if asked not in DRAW_FROM:
        raise CraftError(f"--draw_from={asked} is not known. Use {', '.join(DRAW_FROM)}.")
    if asked == "old_frames" and source != "both":
        raise CraftError(
            f"--draw_from=old_frames is for --anchor_source=both, which has old frames to make anchors from; this is "
            f"{source}. Give a dataset of the old tasks, or leave the flag out."
        )
    return source == "both" and (asked == "old_frames" or (asked == _AUTO and adapter.output_kind == "logits"))


@dataclass
class BuildConfig:
    """`craft cache build`."""

    # Where the cache goes. An unfinished build there is continued.
    output_dir: Path
    # What the teacher can do: frames and instructions of the tasks to keep.
    dataset: DatasetFlags = field(default_factory=DatasetFlags)
    # What it is about to learn: cross anchors pair these frames with the old instructions.
    new_dataset: DatasetFlags = field(default_factory=DatasetFlags)
    # Number of anchors. Unset: 2,000, of a policy that answers in tokens 8,000; and --old_frames on top.
    num_samples: int | None = None
    # dataset: frames of the old datasets | cross: new frames, old instructions, no old frame | both | auto: by which
    # datasets there are.
    anchor_source: str = "auto"
    # For both: how many anchors are old frames. Unset: half of them. Each kind fills half of every batch in any case;
    # of a policy that answers in tokens an old frame comes at most 8 times as often as others, but for one place.
    old_frames: int | None = None
    # For cross: a file with one instruction per line, or the instructions with ; between them. Without it they are
    # read from --dataset's metadata.
    old_instructions: str | None = None
    # Share of the cross anchors whose state is drawn.
    drawn_states: float = 0.7
    # Drawn from what. statistics: those that the teacher's normalizer ships | old_frames: between two old frames of the
    # task, or where the teacher goes from one | auto: old_frames where there are some, of a policy that answers in
    # tokens; else statistics.
    draw_from: str = _AUTO
    # Share of the cross anchors whose state the teacher reaches by its own actions under the old instruction, from the
    # beginning of a new episode, or from an old frame; how the state follows the actions is learned from the new data.
    walked_states: float = 0.5
    # Noise on the other cross anchors' states, in standard deviations.
    state_jitter: float = 0.0
    # action | hidden | token_ce | hidden_multi_layer (hidden with layers_to_save=-2,-1) | yours. With any but action, a
    # layer or a pooling, what is left open is as the documents of the first CRaFT have it.
    retention_mode: str = "action"
    # The layer whose hidden states are kept.
    hidden_layer: str = "-2"
    # Several layers instead: -2,-1 or all or expert:all. Pooled to the vision mean and the last text token of each,
    # unless --pooling or --per_token says otherwise.
    layers_to_save: str | None = None
    # mean_image_tokens | mean_masked | last_token | cls_token | vision_mean+text_last.
    pooling: str | None = None
    # Keep every token instead of pooling.
    per_token: bool = False
    # Logits kept per token of a token policy; all others are folded into one.
    top_k: int = 64
    # (noise, time) draws kept per anchor of a flow or diffusion policy; the others draw nothing, and one is kept.
    num_draws: int = 8
    # embedded: observations are in the cache | reference: images stay in the datasets.
    inputs: str = "embedded"
    # Anchors per forward pass, and per file.
    batch_size: int = 32
    shard_size: int = 256
    # Processes that read frames; 0 reads in a thread.
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.retention_mode == MULTI_LAYER:
            self.retention_mode, self.layers_to_save = "hidden", self.layers_to_save or _SEVERAL
        if self.inputs not in ("embedded", "reference"):
            raise CraftError(f"--inputs must be embedded or reference; got {self.inputs!r}")
        if self.per_token and self.pooling is not None:
            raise CraftError("--per_token keeps every token, --pooling does not: give one of the two")
        for flag in ("batch_size", "shard_size"):
            if getattr(self, flag) < 1:
                raise CraftError(f"--{flag} must be at least 1; got {getattr(self, flag)}")

    def source(self, reads_instruction: bool, has_memory: bool = False) -> str:
        """Where anchors come from, given whether the policy reads instructions and whether there is a memory."""
        return resolve_source(
            self.anchor_source,
            old=bool(self.dataset.repo_id) or has_memory,
            new=bool(self.new_dataset.repo_id) and reads_instruction,
        )

    def retained(self, adapter: PolicyAdapter, policy: Any) -> Retained:
        """The values to keep, with layers resolved for the policy."""
        return mode_named(self.retention_mode).asked(self, adapter, policy)


def digest(recipe: dict[str, Any]) -> str:
    """SHA-256 of a recipe."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def differences(recorded: dict[str, Any], wanted: dict[str, Any]) -> Sequence[str]:
    """Names of the entries that differ between two recipes."""
    return sorted(key for key in recorded.keys() | wanted.keys() if recorded.get(key) != wanted.get(key))


_OF_HIDDEN_STATES = ("hidden_layer", "layers_to_save", "pooling", "per_token")
_MODE = "retention_mode"


@dataclass
class DocumentsBuild(BuildConfig):
    """Hidden states, on frames of the old datasets."""

    num_samples: int | None = 1000
    anchor_source: str = "dataset"
    drawn_states: float = 0.0
    walked_states: float = 0.0
    retention_mode: str = "hidden"
    num_draws: int = 1


def asks_for_documents(flags: Sequence[str]) -> bool:
    """Whether flags (`--x=y` or `--x y`) name a mode of the original notes, a layer or a pooling."""
    given: dict[str, str] = {}
    for flag, following in zip_longest(flags, flags[1:], fillvalue=""):
        name, equals, value = flag.partition("=")
        if name.startswith("--"):
            given[name.removeprefix("--")] = value if equals else following
    if _MODE in given:
        return given[_MODE] != BuildConfig.retention_mode
    return not given.keys().isdisjoint(_OF_HIDDEN_STATES)
