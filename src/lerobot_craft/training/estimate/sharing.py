"""How several devices share a run: what each holds of the parts, and what sharing itself needs."""

from torch import nn

from lerobot_craft.training.estimate.options import EstimateConfig

DDP_BUCKETS, FSDP_GATHERED = "DDP's buckets", "gathered by FSDP at a time"


def share(options: EstimateConfig) -> float:
    """The part of weights, gradients and optimizer state that a device holds."""
    return 1 / options.world_size if options.strategy == "fsdp" else 1.0


def shared_parts(options: EstimateConfig, policy: nn.Module) -> dict[str, int]:
    """Bytes that sharing needs on each device, by what they are.

    DDP reduces gradients in buckets of its own, as many bytes as all gradients (lerobot leaves torch's
    `gradient_as_bucket_view` off). FSDP gathers the weights of a block of layers when their turn comes, the next ones
    already on their way, and makes their gradients whole before it divides them; what is in no block (embeddings, the
    output layer) belongs to the root and is whole during the pass.
    """
    if options.world_size == 1:
        return {}
    if options.strategy == "ddp":
        return {DDP_BUCKETS: sum(p.nbytes for p in policy.parameters() if p.requires_grad)}
    blocks = [_whole(child) for part in policy.modules() if isinstance(part, nn.ModuleList) for child in part]
    inside = {id(p) for part in policy.modules() if isinstance(part, nn.ModuleList) for p in part.parameters()}
    root = sum(_with_gradient(p) for p in policy.parameters() if id(p) not in inside)
    return {FSDP_GATHERED: root + 2 * max(blocks, default=0)}


def _whole(module: nn.Module) -> int:
    return sum(_with_gradient(parameter) for parameter in module.parameters())


def _with_gradient(parameter: nn.Parameter) -> int:
    return parameter.nbytes * (2 if parameter.requires_grad else 1)
