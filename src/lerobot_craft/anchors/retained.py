"""What is retained of a policy: which values, and which losses can compare them.

| kind | columns of a cache |
|---|---|
| hidden, pooled, one layer | `target_features` [D] |
| hidden, pooled, several layers or poolings | `teacher_hidden` [layers, D] or [layers, 2, D] |
| hidden, per token | `hidden.<layer>` [real tokens, D], ragged |
| action, continuous | `target` [draws, steps, D] |
| action, logits | `target` [real positions, k + 1] and `kept` [real positions, k], ragged |
| token_ce | `teacher_ce`; the labels are the fixed tokens |

and for all that need it `fixed.<name>`: noise, time or tokens under which the teacher spoke. Actions and tokens also
have `own_error.<loss>`: how far the teacher itself was from the demonstrator, or, where nobody demonstrated, from its
own actions.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from lerobot_craft.core import DriftKind, Pooling
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import Layer, PolicyAdapter

RetentionMode = Literal["hidden", "token_ce", "action"]
PER_TOKEN: Pooling = "none"  # noqa: S105  # no password: a pooling that keeps tokens
FIXED = "fixed."
OWN_ERROR = "own_error."


@dataclass(frozen=True)
class Retained:
    """Which of the policy's values are retained.

    Attributes:
        mode: `hidden` states, the teacher's tokens (`token_ce`), or what the policy puts out (`action`).
        layers: where hidden states are read.
        pooling: how they become vectors; `none` keeps every token.
        top_k: how many logits are kept at a position of a token policy; the others are folded into one.
        draws: how many (noise, time) draws are kept per anchor where the output depends on them.
    """

    mode: RetentionMode
    layers: tuple[Layer, ...] = ()
    pooling: Pooling = "mean_image_tokens"
    top_k: int = 64
    draws: int = 1

    def __post_init__(self) -> None:
        if self.mode not in get_args(RetentionMode):
            raise CraftError(f"retention_mode must be one of {', '.join(get_args(RetentionMode))}; got {self.mode!r}")
        if self.pooling not in get_args(Pooling):
            raise CraftError(f"pooling must be one of {', '.join(get_args(Pooling))}; got {self.pooling!r}")
        if (self.mode == "hidden") != bool(self.layers):
            raise CraftError("hidden retention needs layers, and only hidden retention has them")
        if self.top_k < 1 or self.draws < 1:
            raise CraftError(f"top_k and num_draws must be at least 1; got {self.top_k} and {self.draws}")
        if self.mode != "action" and self.draws > 1:
            raise CraftError("num_draws is for --retention_mode=action; other values are not drawn")

    @property
    def needs_fixed(self) -> bool:
        """Whether the values depend on noise, time or tokens."""
        return self.mode != "hidden" or any(layer.stack for layer in self.layers)

    def loss_types(self, adapter: PolicyAdapter) -> tuple[str, ...]:
        """Losses that can compare these values."""
        if self.mode == "token_ce":
            return ("token_ce",)
        return ("kl",) if self.mode == "action" and adapter.output_kind == "logits" else ("mse", "l1", "cosine")


def as_kind(kind: str) -> DriftKind:
    """A loss type of hidden states or actions, as `core.drift` names it."""
    return kind  # type: ignore[return-value]  # `loss_types` names nothing else
