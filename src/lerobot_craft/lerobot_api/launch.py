"""Refuses settings of `accelerate launch` or a policy that a run does not support, instead of ignoring them."""

import os
from typing import Any

from lerobot_craft.errors import CraftError

# accelerate's names; on CPUs accelerate ignores the variables that its launcher sets.
_SHARDING = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}


def check_launch(cfg: Any, accelerator: Any, *, enabled: bool) -> None:
    """Refuse settings that would be silently wrong.

    Args:
        cfg: lerobot's settings.
        accelerator: The `Accelerator`.
        enabled: Whether CRaFT is on; if off, everything lerobot-train supports is allowed.

    Raises:
        CraftError: Says what was requested, why it is not supported, and what is.
    """
    for kind, variable in _SHARDING.items():
        if accelerator.distributed_type == kind or os.environ.get(variable, "false").lower() in ("1", "true"):
            raise CraftError(
                f"accelerate is set to {kind}, which does not carry lerobot's policies (docs/scaling.md): run "
                "`accelerate launch --multi_gpu ...`, and where a policy does not fit on one device add "
                "--craft.shard=true (FSDP2)"
            )
    if (steps := accelerator.gradient_accumulation_steps) != 1:
        raise CraftError(
            f"accelerate is set to accumulate gradients over {steps} steps, which lerobot 0.6.1 does not do (it would "
            f"only divide the loss by {steps}): give --gradient_accumulation_steps=1 to accelerate launch, and "
            f"--craft.accumulate={steps} to craft train"
        )
    if not enabled:
        return
    if str(accelerator.state.dynamo_plugin.backend.value) != "NO":
        raise CraftError(
            "accelerate is set to compile the whole policy, which leaves out the hooks that anchors are read by: give "
            "--dynamo_backend=no to accelerate launch, and --policy.compile_model=true where the policy has it"
        )
    if getattr(cfg.policy, "compile_model", False) and cfg.policy.type == "diffusion":
        raise CraftError(
            "--policy.compile_model=true renames the weights of a diffusion policy (unet._orig_mod...), so its "
            "checkpoint would not be one of the policy that was given: give --policy.compile_model=false"
        )
