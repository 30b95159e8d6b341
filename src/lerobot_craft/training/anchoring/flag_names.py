"""Complaints of `craft cache build`'s parts, in the flags that a person typed for `craft train`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from lerobot_craft.errors import CraftError

_FLAG = re.compile(r"--([a-z_]+)")
_IN_TRAINING = {
    "output_dir": "craft.anchor_cache_dir",
    "dataset": "craft.old_dataset",
    "new_dataset": "dataset",
    "num_samples": "craft.num_anchors",
    **{
        name: f"craft.{name}"
        for name in (
            "anchor_source",
            "old_instructions",
            "drawn_states",
            "state_jitter",
            "retention_mode",
            "hidden_layer",
            "layers_to_save",
            "pooling",
            "per_token",
            "top_k",
            "num_draws",
        )
    },
}


@contextmanager
def flags_of_training() -> Iterator[None]:
    """Errors from within name the flags of `craft train` instead of those of `craft cache build`."""
    try:
        yield
    except CraftError as error:
        raise CraftError(_FLAG.sub(_translated, str(error))) from error


def _translated(flag: re.Match[str]) -> str:
    return f"--{_IN_TRAINING.get(flag[1], flag[1])}"
