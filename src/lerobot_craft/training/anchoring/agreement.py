"""Whether the anchors are those that the flags ask for: what is set must be what they hold."""

from pathlib import Path

from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.plan import parse_old_instructions
from lerobot_craft.anchors.retained import Retained
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for, unwrapped
from lerobot_craft.training.config import LOSS_TYPES, CraftConfig
from lerobot_craft.training.methods.method import Context


def check_values(context: Context, held: Retained, directory: Path) -> None:
    """Refuse a cache of other values, such as of other layers, than those that the flags ask for."""
    adapter = adapter_for(context.teacher.config)
    if wanted := held.disagreements(context.config, adapter, unwrapped(context.policy)):
        raise CraftError(
            f"{directory} holds {held}, and training asks for {' and '.join(wanted)}: leave these flags out to use "
            "what the cache holds, or build another one with `craft cache build`"
        )


def check_origin(config: CraftConfig, source: str, manifest: Manifest, directory: Path) -> None:
    """Refuse a cache of other anchors than the flags would build: one that is there is not built again."""
    if not config.names_an_origin:
        return
    differing = []
    if source != manifest.anchor_source:
        differing.append(f"--craft.anchor_source={source}, it has {manifest.anchor_source} anchors")
    if config.old_instructions is not None:
        asked = parse_old_instructions(config.old_instructions)
        if set(asked) != set(manifest.instructions):
            differing.append(f"--craft.old_instructions, it has {'; '.join(manifest.instructions)}")
    if source != "cross":
        known = {record.repo_id for record in manifest.datasets}
        names = [repo_id for repo_id, _ in config.old_dataset.addresses("craft.old_dataset")]
        if any(name not in known for name in names):
            differing.append(f"--craft.old_dataset.repo_id, it has frames of {', '.join(sorted(known))}")
    if differing:
        raise CraftError(
            f"{directory} holds other anchors than the flags ask for ({', and for '.join(differing)}): leave these "
            "flags out to use it as it is, or give another --craft.anchor_cache_dir"
        )


def check_loss_type(context: Context, retained: Retained) -> None:
    """Refuse a loss that cannot compare what is retained."""
    allowed = retained.loss_types(adapter_for(context.teacher.config))
    loss_type = context.config.loss_type
    if loss_type is None or loss_type in allowed:
        return
    can_be_given = [loss for loss in allowed if loss in LOSS_TYPES]
    remedy = f"use {', '.join(can_be_given)}" if can_be_given else "leave it out"
    raise CraftError(
        f"--craft.loss_type={loss_type} cannot compare what --craft.retention_mode={retained.mode} keeps: {remedy}"
    )
