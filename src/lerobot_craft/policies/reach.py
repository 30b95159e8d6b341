"""What a retention loss can hold: it retains nothing if its gradient reaches no trained parameter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from lerobot_craft.errors import CraftError
from lerobot_craft.policies.adapter import Layer, PolicyAdapter, belongs_to, unwrapped


class Reach(NamedTuple):
    """Trainable parameters that the retention gradient reaches (`held`), and the others (`free`)."""

    held: list[str]
    free: list[str]
    """Trained without any retention gradient: these may drift as they like."""


def reach_of(adapter: PolicyAdapter, policy: Any, layers: Sequence[Layer] | None) -> Reach:
    """Reach of retention on the hidden states at `layers`, or (None) on the output."""
    policy = unwrapped(policy)
    reached = set(adapter.reached_parameters(policy, layers))
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    return Reach([name for name in trained if name in reached], [name for name in trained if name not in reached])


def check_reach(adapter: PolicyAdapter, policy: Any, layers: Sequence[Layer] | None) -> Reach:
    """Like `reach_of`, but refuses a configuration in which retention holds nothing."""
    reach = reach_of(adapter, policy, layers)
    if all(layers is not None and belongs_to(name, adapter.state_inputs) for name in reach.held):
        what = "the output" if layers is None else f"hidden states at layer {', '.join(map(str, layers))}"
        found = f"only {', '.join(adapter.state_inputs)}" if reach.held else "no trained parameter"
        count = len(reach.held) + len(reach.free)
        trained = f"{count} trained tensors" if count else "nothing: every parameter is frozen"
        raise CraftError(
            f"retention on {what} of {adapter.policy_type} reaches {found} (this configuration trains {trained}), "
            f"so it would hold nothing: {adapter.how_to_reach(unwrapped(policy))}"
        )
    return reach
