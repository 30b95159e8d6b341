"""A retention mode of one's own: attention maps, the mode that the original CRaFT notes name as one to come.

What is retained is where a layer of pi0_fast or ACT looks: how much of its attention each token gets, averaged over
heads. The class is all of it; flags, cache, checks, budget and logs follow (docs/adding-a-retention-mode.md).

    python examples/own_retention_mode.py    # makes a small pi0_fast with random weights and trains three steps
    PYTHONPATH=examples craft train --discover_packages_path=own_retention_mode --craft.retention_mode=attention_map ...
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from lerobot_craft.anchors.modes import Retained, register_mode
from lerobot_craft.cli import main as craft
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Batch, Fixed, Output, PolicyAdapter
from lerobot_craft.policies.taps import eager_attention
from lerobot_craft.tiny.__main__ import main as make_tiny

LAYERS = {
    "pi0_fast": "model.paligemma_with_expert.paligemma.model.language_model.layers",
    "act": "model.encoder.layers",
}


def attention_map(weights: Tensor, mask: Tensor) -> Tensor:
    """Attention of queries to keys [B, (heads,) T, T], mask [B, T] -> what each token gets [B, T]; 1: an even share."""
    weights = weights.float().mean(dim=1) if weights.dim() == 4 else weights.float()
    return weights.masked_fill(~mask[:, :, None], 0).sum(dim=1)  # over queries: each spreads 1 over the keys


@register_mode  # for this process; an installed package declares an entry point instead
@dataclass(frozen=True)
class AttentionMap(Retained):
    """Where each of `layers` looks."""

    mode: ClassVar[str] = "attention_map"
    unit: ClassVar[str] = "the spread of the teacher's attention maps"

    def take(self, adapter: PolicyAdapter, policy: Any, batch: Batch, fixed: Fixed | None) -> dict[str, Output]:
        if adapter.policy_type not in LAYERS:
            raise CraftError(f"attention_map reads {' and '.join(LAYERS)}, not {adapter.policy_type}: add it to LAYERS")
        layers = policy.get_submodule(LAYERS[adapter.policy_type])
        modules = {layer: layers[layer.index].self_attn for layer in self.layers}
        seen: dict[Any, Tensor] = {}
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, out, at=layer: seen.update({at: out[1]}))
            for layer, module in modules.items()
        ]
        try:
            with eager_attention(*(module.config for module in modules.values() if hasattr(module, "config"))):
                tokens = adapter.hidden(policy, batch, self.layers, fixed)
        finally:
            for hook in hooks:
                hook.remove()
        maps = {layer: attention_map(seen[layer], tokens[layer].mask) for layer in self.layers}
        return {str(at): Output(found[:, None], tokens[at].mask.any(1, keepdim=True)) for at, found in maps.items()}


def main(arguments: list[str] | None = None) -> int:
    """Three steps of `craft train` with it; 0 if they were taken."""
    parser = argparse.ArgumentParser(description="Train three steps with a retention mode of one's own.")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/own_retention_mode"), help="must not exist")
    out = parser.parse_args(arguments).output_dir
    make_tiny([f"--output_dir={out / 'tiny'}"])
    flags = [f"--policy.path={out}/tiny/teacher", "--dataset.repo_id=local/new", f"--dataset.root={out}/tiny/new"]
    flags += ["--steps=3", "--batch_size=4", "--num_workers=0", "--log_freq=1", f"--output_dir={out / 'run'}"]
    flags += ["--craft.enabled=true", "--craft.retention_mode=attention_map", "--craft.num_anchors=24"]
    flags += ["--craft.old_dataset.repo_id=local/old", f"--craft.old_dataset.root={out}/tiny/old"]
    return craft(["train", *flags, f"--craft.anchor_cache_dir={out / 'anchors'}", "--craft.retention_freq=1"])


if __name__ == "__main__":
    sys.exit(main())
