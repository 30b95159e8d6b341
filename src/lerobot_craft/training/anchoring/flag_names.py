"""Complaints of `craft cache build`'s parts, in the flags that a person typed for `craft train`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

from lerobot_craft.anchors.recipe import BuildConfig
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig

_FLAG = re.compile(r"--([a-z_]+)")
_IN_TRAINING = {
    "output_dir": "craft.anchor_cache_dir",
    "dataset": "craft.old_dataset",
    "new_dataset": "dataset",
    "num_samples": "craft.num_anchors",
    # What both have under one name.
    **{field.name: f"craft.{field.name}" for field in fields(BuildConfig) if field.name in CraftConfig.__annotations__},
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
