"""What must hold before the first step: the student is the teacher, and retention can hold what is trained."""

from dataclasses import dataclass, replace

import torch

from lerobot_craft.anchors.student_values import student_drift
from lerobot_craft.anchors.verify import Reproduction, floor_of, relative_deviation, reproduce
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import autocast, autocast_dtype, autocast_name
from lerobot_craft.policies import adapter_for, check_reach, mode, unwrapped
from lerobot_craft.training.anchoring.asking import policy_inputs
from lerobot_craft.training.anchoring.cached import CachedAnchors
from lerobot_craft.training.anchoring.flag_names import flags_of_training
from lerobot_craft.training.anchoring.source import Anchors
from lerobot_craft.training.methods.method import Context

_REPRODUCED = 32
_TOGETHER = 16
_BACKWARD = 2  # anchors of the one backward: the graph is the same for any number


@dataclass(frozen=True)
class StartReport:
    """What the checks measured.

    Attributes:
        reproduction: Drift of the student from the teacher before the first step; None in a resumed run.
        held: Trained tensors that the retention gradient reaches.
        free: Trained tensors that it does not.
    """

    reproduction: Reproduction | None
    held: int
    free: int


def check_start(context: Context, anchors: Anchors, loss_type: str) -> StartReport:
    """Refuse to train what would not be held, or held to something else than the teacher.

    Raises:
        CraftError: Gradients are scaled (float16), retention reaches nothing that is trained, or the student is not the
            teacher at its first step.
    """
    _refuse_float16(context)
    layers = anchors.retained.layers or None
    with flags_of_training():
        reach = check_reach(adapter_for(context.teacher.config), context.policy, layers)
    _check_graph(context, anchors, loss_type)
    reproduction = None if context.resumed else _check_student(context, anchors)
    return StartReport(reproduction, len(reach.held), len(reach.free))


def _refuse_float16(context: Context) -> None:
    if "fp16" in (autocast_name(context.teacher.config), context.accelerator.mixed_precision):
        raise CraftError(
            "float16 training scales its loss, which two gradients that are merged do not survive: train in bfloat16 "
            "(--policy.dtype=bfloat16, or `accelerate launch --mixed_precision=bf16`) or in float32"
        )


def _check_graph(context: Context, anchors: Anchors, loss_type: str) -> None:
    """One backward: what `check_reach` concludes from names, autograd must confirm."""
    adapter, policy = adapter_for(context.teacher.config), unwrapped(context.policy)
    few = anchors.take(torch.arange(min(_BACKWARD, anchors.num_anchors)))
    batch = policy_inputs(few.raw, context.teacher.preprocessor)
    with mode(policy, train=adapter.train_mode):
        with autocast(context.teacher.config):
            drift = student_drift(
                adapter, policy, batch, few.columns, anchors.retained, loss_type, draw=few.draw
            ).mean()
        # Within the mode: gradient checkpointing runs the forward again.
        reached = drift.requires_grad and any(
            gradient is not None for gradient in torch.autograd.grad(drift, context.trained, allow_unused=True)
        )
    if not reached:
        raise CraftError(
            f"the gradient of {anchors.retained.mode} retention reaches none of the {len(context.trained)} trained "
            f"tensors of this {adapter.policy_type}, so it would hold nothing: {adapter.how_to_reach(policy)}"
        )


def _check_student(context: Context, anchors: Anchors) -> Reproduction:
    found = _reproduction(context, anchors)
    if found.holds:
        return found
    if anchors.directory is None:
        why = "the adapter does not start at zero (see --peft.init_type), or the policy's forward is random"
    else:
        why = (
            "weights, statistics and tokenizers are the cache's, so a PEFT adapter that does not start at zero (see "
            "--peft.init_type), the images, the device or the library versions make the difference: build the cache "
            "again on this machine with `craft cache build` if it is not the adapter"
        )
    raise CraftError(
        f"before the first step the student already differs from {anchors.directory or 'its teacher'}: over "
        f"{found.anchors} anchors the relative drift is up to {found.largest:.2g}, where rounding leaves at most "
        f"{found.floor:.0e}. Retention would pull to something else than what the policy can do: {why}"
    )


def _reproduction(context: Context, anchors: Anchors) -> Reproduction:
    student = replace(context.teacher, policy=unwrapped(context.policy))
    if isinstance(anchors, CachedAnchors):
        return reproduce(anchors.loader, student, _REPRODUCED, _TOGETHER)
    adapter = adapter_for(student.config)
    chosen = torch.arange(min(_REPRODUCED, anchors.num_anchors))
    found = []
    with torch.no_grad(), mode(student.policy, train=adapter.train_mode):
        for indices in chosen.split(_TOGETHER):
            deviation = relative_deviation(adapter, student, anchors.take(indices), anchors.retained)
            found.append(deviation.max())
    dtype = autocast_dtype(context.teacher.config) or _widest_dtype(context)
    return Reproduction(len(chosen), float(torch.stack(found).max()), floor_of(dtype, adapter, anchors.retained))


def _widest_dtype(context: Context) -> str:
    widest = max(unwrapped(context.policy).parameters(), key=lambda parameter: parameter.numel())
    return str(widest.dtype).removeprefix("torch.")
