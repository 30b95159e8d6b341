"""The configuration of a cache, and the recipe that identifies its content.

Two builds with the same recipe give the same bytes, on any machine and after any number of interruptions.

The defaults of the original CRaFT notes apply if a flag asks for hidden states.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lerobot_craft.anchors.retained import MULTI_LAYER, Retained, mode_named
from lerobot_craft.errors import CraftError, setting
from lerobot_craft.io.argv import read_flags
from lerobot_craft.policies import PolicyAdapter

_SEVERAL = "-2,-1"
# Token policies answer the same at every visit of an anchor and overfit to a few, so they need more anchors; other
# policies are asked under several noise draws (decision 0017).
_ANCHORS, _ANCHORS_OF_TOKENS = 2000, 8000
_MOST_DRAWS = 8
# For the same reason a few old frames do not fill half of a token policy's batches: visits per old frame, per visit of
# a cross anchor.
_VISITS_OF_TOKENS = 8
_AUTO = "auto"
OLD_DATASET = "old_dataset"  # the setting that names the datasets of the old tasks
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

    def addresses(self, name: str) -> list[tuple[str, str | None]]:
        """(repo_id, root) of each dataset; `name` is the setting that holds these flags."""
        names = [name.strip() for name in self.repo_id.split(",") if name.strip()]
        roots: list[str | None] = [root.strip() for root in self.root.split(",") if root.strip()]
        if roots and len(roots) != len(names):
            raise CraftError(
                f"{setting(f'{name}.repo_id')} names {len(names)} datasets and {setting(f'{name}.root')} {len(roots)} "
                "directories: give one directory for each, in the same order, separated by commas"
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
    """Draws per anchor: as asked for, or (None) at most the number of visits that training makes."""
    return asked or min(_MOST_DRAWS, max(1, visits // anchors))


def most_visits(adapter: PolicyAdapter) -> float | None:
    """How often a rare anchor may be visited, relative to the others; None: no limit."""
    return _VISITS_OF_TOKENS if adapter.output_kind == "logits" else None


def draws_from_old(asked: str, source: str, adapter: PolicyAdapter) -> bool:
    """Whether drawn states come from old frames instead of the statistics.

    The default is True for token policies if there are old frames (decision 0029).
    """
    if asked not in DRAW_FROM:
        raise CraftError(f"{setting('draw_from')}={asked} is not known. Use {', '.join(DRAW_FROM)}.")
    if asked == "old_frames" and source != "both":
        raise CraftError(
            f"{setting('draw_from')}=old_frames is for {setting('anchor_source')}=both, which has old frames to make "
            f"anchors from; this is {source}. Give a dataset of the old tasks, or leave the flag out."
        )
    return source == "both" and (asked == "old_frames" or (asked == _AUTO and adapter.output_kind == "logits"))


@dataclass(kw_only=True)
class AnchorConfig:
    """Which anchors there are, and what is retained on them: for `craft train` and `craft cache build`."""

    # What is retained: action | hidden | token_ce | hidden_multi_layer (hidden with layers_to_save=-2,-1) | yours; in
    # training also several, as hidden+action, with a budget and a cache each. With any but action, a layer or a
    # pooling, what is left open is as the documents of the first CRaFT have it.
    retention_mode: str = "action"
    # dataset: frames of the old datasets | cross: frames of the new task with old instructions, no old frame | both |
    # auto: both where there is an old dataset, else cross; dataset for a policy that reads no instruction.
    anchor_source: str = "auto"
    # Datasets of the old tasks, separated by commas.
    old_dataset: DatasetFlags = field(default_factory=DatasetFlags)
    # For cross: a file with one instruction per line, or the instructions with ; between them. Unset: those of the old
    # datasets.
    old_instructions: str | None = None
    # Number of anchors. Unset: 2,000 (pi0_fast: 8,000), plus old_frames.
    num_anchors: int | None = None
    # For both: how many of them are frames of the old datasets. Unset: half. Each kind fills half of every batch. With
    # pi0_fast, old frames are drawn at most 8 times as often as others, and at least once per batch.
    old_frames: int | None = None
    # For cross: share of anchors whose state the teacher reaches by its own actions under the old instruction, from the
    # beginning of a new episode, or from an old frame; how the state follows the actions is learned from the new data.
    walked_states: float = 0.5
    # For cross: share of states that are drawn (on walks: what is not the robot's own).
    drawn_states: float = 0.7
    # statistics: drawn from the teacher's statistics | old_frames: between two old frames of the task, where walks
    # begin too | auto: old_frames for pi0_fast if there are any, else statistics.
    draw_from: str = "auto"
    # For cross: noise on states that are not drawn, in standard deviations.
    state_jitter: float = 0.0

    # Which hidden states. A cache knows its own: what is set here must agree with it. Unset: layer -2.
    hidden_layer: str | None = None
    # Several layers, separated by commas, such as -2,-1; or all, or expert:all.
    layers_to_save: str | None = None
    # mean_image_tokens | mean_masked | last_token | cls_token | vision_mean+text_last. Unset: mean_image_tokens; for
    # layers_to_save vision_mean+text_last.
    pooling: str | None = None
    # Keep every token instead of pooling.
    per_token: bool = False
    # For action: logits kept per token of a token policy; all others are folded into one.
    top_k: int = 64
    # For action: (noise, time) draws per anchor of a flow or diffusion policy; the others draw nothing, and one is
    # kept. Unset: 8; in training at most as many as there are visits of an anchor.
    num_draws: int | None = None

    def __post_init__(self) -> None:
        if self.per_token and self.pooling is not None:
            raise CraftError(
                f"{setting('per_token')} keeps every token, {setting('pooling')} does not: give one of the two"
            )

    @property
    def names_an_origin(self) -> bool:
        """Whether it says where anchors can be taken from."""
        return bool(self.old_dataset.repo_id) or self.old_instructions is not None

    def source(self, reads_instruction: bool, has_memory: bool = False) -> str:
        """Where anchors come from, given whether the policy reads instructions and whether there is a memory."""
        old = bool(self.old_dataset.repo_id) or has_memory
        return resolve_source(self.anchor_source, old=old, new=reads_instruction)

    def retained(self, adapter: PolicyAdapter, policy: Any) -> Retained:
        """The values to keep, with layers resolved for the policy."""
        layers = self.layers_to_save
        if self.retention_mode == MULTI_LAYER:
            layers = layers or _SEVERAL
        draws = _MOST_DRAWS if self.num_draws is None else self.num_draws
        settled = replace(self, layers_to_save=layers, num_draws=draws)
        return mode_named(self.retention_mode).asked(settled, adapter, policy)

    def anchor_settings(self) -> dict[str, Any]:
        """What it shares with every other configuration that has anchors, by name."""
        return {each.name: getattr(self, each.name) for each in fields(AnchorConfig)}


@dataclass(kw_only=True)
class BuildConfig(AnchorConfig):
    """`craft cache build`."""

    # Where the cache goes. An unfinished build there is continued.
    output_dir: Path
    # What the teacher is about to learn: cross anchors pair these frames with the old instructions.
    new_dataset: DatasetFlags = field(default_factory=DatasetFlags)
    # embedded: observations are in the cache | reference: images stay in the datasets.
    inputs: str = "embedded"
    # Anchors per forward pass, and per file.
    batch_size: int = 32
    shard_size: int = 256
    # Processes that read frames; 0 reads in a thread.
    num_workers: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.inputs not in ("embedded", "reference"):
            raise CraftError(f"{setting('inputs')} must be embedded or reference; got {self.inputs!r}")
        super().__post_init__()
        for name in ("batch_size", "shard_size"):
            if getattr(self, name) < 1:
                raise CraftError(f"{setting(name)} must be at least 1; got {getattr(self, name)}")

    def source(self, reads_instruction: bool, has_memory: bool = False) -> str:
        """The same, given also whether there is a new dataset."""
        return super().source(reads_instruction and bool(self.new_dataset.repo_id), has_memory)


def digest(recipe: dict[str, Any]) -> str:
    """SHA-256 of a recipe."""
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def differences(recorded: dict[str, Any], wanted: dict[str, Any]) -> Sequence[str]:
    """Names of the entries that differ between two recipes."""
    return sorted(key for key in recorded.keys() | wanted.keys() if recorded.get(key) != wanted.get(key))


_OF_HIDDEN_STATES = ("hidden_layer", "layers_to_save", "pooling", "per_token")
_MODE = "retention_mode"


@dataclass(kw_only=True)
class DocumentsAnchors(AnchorConfig):
    """The defaults of the original CRaFT notes: hidden states, on frames of the old datasets."""

    retention_mode: str = "hidden"
    anchor_source: str = "dataset"
    num_anchors: int | None = 1000
    walked_states: float = 0.0
    drawn_states: float = 0.0
    num_draws: int | None = 1


@dataclass(kw_only=True)
class DocumentsBuild(DocumentsAnchors, BuildConfig):
    """`craft cache build` with the defaults of the original CRaFT notes."""


def asks_for_documents(flags: Sequence[str]) -> bool:
    """Whether flags (`--x=y` or `--x y`) name a mode of the original notes, a layer or a pooling."""
    given = dict(read_flags(flags))
    if _MODE in given:
        return given[_MODE] != AnchorConfig.retention_mode
    return not given.keys().isdisjoint(_OF_HIDDEN_STATES)
