"""pi05: pi0 with the state written into the prompt and the time fed to the expert's norms."""

from typing import Any, override

from torch import Tensor

from lerobot_craft.policies.adapter import Batch
from lerobot_craft.policies.pi0 import PI0Adapter


class PI05Adapter(PI0Adapter):
    """Backbone: images and language (with the state). Stack `expert`: the noisy action tokens."""

    policy_type = "pi05"
    input_projections = ("action_in_proj", "time_mlp_in", "time_mlp_out")
    state_tokens = 0

    @override
    def state_of(self, policy: Any, batch: Batch) -> tuple[Tensor, ...]:
        return ()
