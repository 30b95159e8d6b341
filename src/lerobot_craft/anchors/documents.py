"""The defaults of the original CRaFT notes for a cache. They apply if a flag asks for hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from lerobot_craft.anchors.recipe import BuildConfig

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
