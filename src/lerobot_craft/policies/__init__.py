"""What CRaFT must know about each lerobot policy: hidden states, outputs, token layout, and its randomness.

    adapter = adapter_for(policy.config)
    layers = adapter.resolve(policy, "-2")
    tokens = adapter.hidden(policy, batch, layers)[layers[0]]  # [B, T, D], mask, spans

One file per policy. `adapter.py` is the contract and finds adapters; see docs/adding-a-policy.md.
"""

from lerobot_craft.policies.adapter import (
    ENTRY_POINT_GROUP,
    Batch,
    Demonstration,
    Fixed,
    Layer,
    Output,
    PolicyAdapter,
    Reach,
    Tokens,
    adapter_for,
    check_reach,
    reach_of,
    register_adapter,
    supported_policies,
    unwrapped,
)
from lerobot_craft.policies.taps import mode

__all__ = [
    "ENTRY_POINT_GROUP",
    "Batch",
    "Demonstration",
    "Fixed",
    "Layer",
    "Output",
    "PolicyAdapter",
    "Reach",
    "Tokens",
    "adapter_for",
    "check_reach",
    "mode",
    "reach_of",
    "register_adapter",
    "supported_policies",
    "unwrapped",
]
