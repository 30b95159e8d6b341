"""Whether the anchors are those that the flags ask for: what is set must be what they hold."""

from pathlib import Path

from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.plan import parse_old_instructions
from lerobot_craft.anchors.retained import PER_TOKEN, Retained
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for, unwrapped
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Context


def check_layers(context: Context, held: Retained, directory: Path) -> None:
    """Refuse a cache of other layers or another pooling than those that are set."""
    config = context.config
    if held.mode != "hidden":
        return
    wanted = []
    if asked := config.layers_to_save or config.hidden_layer:
        layers = adapter_for(context.teacher.config).resolve(unwrapped(context.policy), asked)
        if set(layers) != set(held.layers):
            flag = "layers_to_save" if config.layers_to_save else "hidden_layer"
            wanted.append(f"layer {', '.join(map(str, layers))} (--craft.{flag}={asked})")
    if config.per_token and held.pooling != PER_TOKEN:
        wanted.append("every token (--craft.per_token)")
    elif config.pooling not in (None, held.pooling):
        wanted.append(f"pooling {config.pooling} (--craft.pooling)")
    if wanted:
        pooling = "every token" if held.pooling == PER_TOKEN else f"pooling {held.pooling}"
        raise CraftError(
            f"{directory} holds layer {', '.join(map(str, held.layers))}, {pooling}, and training asks for "
            f"{' and '.join(wanted)}: leave these flags out to use what the cache holds, or build another one with "
            "`craft cache build`"
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
    remedy = "leave it out" if retained.mode == "token_ce" else f"use {', '.join(allowed)}"
    raise CraftError(
        f"--craft.loss_type={loss_type} cannot compare what --craft.retention_mode={retained.mode} keeps: {remedy}"
    )
