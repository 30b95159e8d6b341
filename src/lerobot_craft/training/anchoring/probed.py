"""Which anchors the drift of the actions is measured on, also for methods that hold none."""

import dataclasses
import logging
from pathlib import Path

from lerobot_craft.anchors.manifest import MANIFEST_FILE, Manifest
from lerobot_craft.anchors.prepare import old_instructions
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.policies import adapter_for
from lerobot_craft.training.anchoring.probe import ActionProbe
from lerobot_craft.training.anchoring.remembered import Remembered
from lerobot_craft.training.anchoring.source import Anchors, open_anchors
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Context, Method

logger = logging.getLogger(__name__)

_OWN_CACHE = "probe_anchors"


def make_probe(method: Method, output_dir: Path) -> ActionProbe | None:
    """The probe of a run; None where it is not wanted or nothing is known of the old tasks."""
    context = method.asked
    config = context.config
    if config.probe_anchors == 0:
        return None
    anchors: Anchors | None = method.old_anchors
    kept = None if context.remembered is None else context.remembered.to_measure()
    if (anchors is None or kept is not None) and config.normalization != "keep":
        logger.warning(
            "the drift of the actions is not measured: with --craft.normalization=%s the policy acts differently "
            "before its first step",
            config.normalization,
        )
        return None
    if kept is not None:
        return ActionProbe.of_kept_frames(context, _kept_anchors(context, kept, output_dir), output_dir, anchors)
    if anchors is None:
        anchors = _anchors(context, output_dir)
    return None if anchors is None else ActionProbe.prepare(context, anchors, output_dir)


def _kept_anchors(context: Context, kept: Remembered, output_dir: Path) -> Anchors:
    """The teacher's actions on frames of the memory that are kept out of training, asked once and kept with the run."""
    own = dataclasses.replace(
        _of_actions(context.config, output_dir),
        anchor_source="dataset",
        old_dataset=DatasetFlags(),
        old_instructions=None,
        num_anchors=None,
        draw_from="auto",
    )
    return open_anchors(dataclasses.replace(context, config=own, remembered=kept))


def _of_actions(config: CraftConfig, output_dir: Path) -> CraftConfig:
    """The settings of a small cache of actions in the run's own directory."""
    return dataclasses.replace(
        config,
        retention_mode="action",
        teacher="cache",
        anchor_cache_dir=output_dir / _OWN_CACHE,
        old_frames=None,
        walked_states=0.0,
        drawn_states=0.0,
        loss_type=None,
        per_token=False,
        pooling=None,
        hidden_layer=None,
        layers_to_save=None,
    )


def _anchors(context: Context, output_dir: Path) -> Anchors | None:
    """Those of a cache that was given, or a few of the old datasets, asked once and kept with the run."""
    config = context.config
    given = config.anchor_cache_dir
    if given is not None and (given / MANIFEST_FILE).exists():
        of_cache = dataclasses.replace(
            config, retention_mode=Manifest.load(given).kind, teacher="cache", loss_type=None
        )
        return open_anchors(dataclasses.replace(context, config=of_cache))
    old_frames = bool(config.old_dataset.repo_id) and config.source(reads_instruction=False) == "dataset"
    if not (config.names_an_origin if adapter_for(context.teacher.config).reads_instruction else old_frames):
        return None
    own = dataclasses.replace(
        _of_actions(config, output_dir),
        num_anchors=max(config.probe_anchors, 2 * _num_tasks(config)),  # old and new frames of each
    )
    return open_anchors(dataclasses.replace(context, config=own))


def _num_tasks(config: CraftConfig) -> int:
    return len(old_instructions(config.build_config(Path(), DatasetFlags(), seed=0)))
