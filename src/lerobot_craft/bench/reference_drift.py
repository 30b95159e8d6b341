"""How far a fine-tuned policy has moved on the old tasks, measured the same way for every method.

The base's actions and hidden states on some old frames are stored once; each run is compared with them afterward. The
frames have their own seed: no method is measured only on frames that it used.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lerobot_craft.anchors.build import Ranks, build_cache, prepare
from lerobot_craft.anchors.loader import AnchorLoader, open_cache, retained_of
from lerobot_craft.anchors.recipe import BuildConfig, DatasetFlags
from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.evaluation.results import Drift
from lerobot_craft.lerobot_api.pretrained import autocast
from lerobot_craft.lerobot_api.rollouts import Player
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.training.anchor_batches import layer_scales_of, policy_inputs, units_of

_FRAMES_PER_TASK = 40
_SEED = 90_210  # not used by any run
_BATCH = 64
_ACTION, _HIDDEN = "action", "hidden"


def keep_reference(checkpoint: Path, old_data: Path, num_tasks: int, layers: str, directory: Path) -> None:
    """Store a policy's values on old frames: `directory/action` and, if `layers` is given, `directory/hidden`.

    Args:
        checkpoint: The policy's checkpoint.
        old_data: Directory of the old tasks' dataset.
        num_tasks: Number of old tasks.
        layers: All its layers, as in `--layers_to_save`; empty: do not compare hidden states.
        directory: Output directory of both caches.
    """
    teacher = load_teacher(checkpoint, ["--device=cpu"])
    for kind in (_ACTION, _HIDDEN) if layers else (_ACTION,):
        config = BuildConfig(
            output_dir=directory / kind,
            old_dataset=DatasetFlags(f"craft/{old_data.name}", str(old_data)),
            num_anchors=_FRAMES_PER_TASK * num_tasks,
            retention_mode=kind,
            layers_to_save=layers if kind == _HIDDEN else None,
            per_token=kind == _HIDDEN,
            seed=_SEED,
        )
        build_cache(prepare(config, teacher), config.output_dir, ranks=Ranks())


def measure_drift(player: Player, reference: Path, tasks: Sequence[str], instructions: Sequence[str]) -> Drift:
    """Drift of a policy from the reference, per task.

    For actions, in units of the base's own error on that task; for hidden states, in units of each layer's spread.

    Args:
        player: The fine-tuned policy.
        reference: Output directory of `keep_reference`.
        tasks: Names of the old tasks.
        instructions: Their instructions, in the same order.
    """
    names = dict(zip(instructions, tasks, strict=True))

    def by_name(kind: str) -> dict[str, float]:
        found = drift_on(player, open_cache(reference / kind, verify=False))
        return {names[instruction]: drift for instruction, drift in found.items()}

    action = by_name(_ACTION)
    hidden = by_name(_HIDDEN) if (reference / _HIDDEN).is_dir() else {}
    return Drift(_mean(action), _mean(hidden), action, hidden)


def _mean(per_task: dict[str, float]) -> float | None:
    return sum(per_task.values()) / len(per_task) if per_task else None


def drift_on(player: Player, anchors: AnchorLoader) -> dict[str, float]:
    """Mean drift of a policy on all anchors of a cache, by instruction, in the units of `measure_drift`."""
    adapter, manifest = adapter_for(player.config), anchors.manifest
    policy = unwrapped(player.policy)
    retained = retained_of(manifest, adapter, policy)
    loss_type = retained.loss_types(adapter)[0]
    scales = layer_scales_of(manifest.values.get("layer_scales"), loss_type)
    units = [1.0] * len(manifest.instructions)
    if retained.has_own_error:
        units = units_of(manifest.scales, manifest.instructions, loss_type)
    drifts: list[Tensor] = []
    of_task: list[Tensor] = []
    with torch.no_grad(), mode(policy, train=adapter.train_mode):
        for indices in torch.arange(len(anchors.store)).split(_BATCH):
            batch = anchors.take(indices)
            with autocast(player.config):
                inputs = policy_inputs(batch.raw, player.preprocessor)
                drift = student_drift(adapter, policy, inputs, batch.columns, retained, loss_type, layer_scales=scales)
            drifts.append(drift.double().cpu())
            of_task.append(batch.instruction)
    drift, instruction = torch.cat(drifts), torch.cat(of_task)
    return {
        text: drift[instruction == index].mean().item() / units[index]
        for index, text in enumerate(manifest.instructions)
    }
