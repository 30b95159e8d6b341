"""What `accelerate launch` and a policy's settings may ask for and a run cannot give: refused by name, not ignored."""

import os
from typing import Any

from lerobot_craft.errors import CraftError

# By accelerate's name of them; on CPUs it does not even look at the variables that its launcher sets.
_SHARDING = {
    "FSDP": "ACCELERATE_USE_FSDP",
    "DEEPSPEED": "ACCELERATE_USE_DEEPSPEED",
    "MEGATRON_LM": "ACCELERATE_USE_MEGATRON_LM",
}


def check_launch(cfg: Any, accelerator: Any, *, enabled: bool) -> None:
    """Refuse what would be wrong without a word.

    Args:
        cfg: lerobot's settings.
        accelerator: accelerate's.
        enabled: Whether CRaFT is on; without it, what lerobot-train can do is allowed.

    Raises:
        CraftError: It says what was asked for, why it is not there, and what is.
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
            f"only divide the loss by {steps}): leave out --gradient_accumulation_steps, and use a larger --batch_size "
            "or more processes"
        )
    if not enabled:
        return
    if str(accelerator.state.dynamo_plugin.backend.value) != "NO":
        raise CraftError(_NOT_COMPILED.format(flag="--dynamo_backend=no to accelerate launch"))
    if getattr(cfg.policy, "compile_model", False):
        raise CraftError(_NOT_COMPILED.format(flag="--policy.compile_model=false"))


_NOT_COMPILED = (
    "anchors are read by hooks inside the policy, which torch.compile leaves out of what it has compiled, so CRaFT "
    "does not train compiled policies: give {flag}"
)
