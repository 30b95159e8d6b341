"""The same anchors under several retention modes (`--craft.retention_mode=hidden+action`): one cache for each mode.

All are built by one plan, so anchor i is the same frame under the same instruction in each. Modes thus never meet in a
cache, and everything that reads one knows a single mode.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lerobot_craft.anchors.modes.action import Action
from lerobot_craft.errors import CraftError
from lerobot_craft.training.anchoring.source import Anchors, open_anchors
from lerobot_craft.training.methods.method import Context, Cost


class SeveralAnchors:
    """Anchors of the first mode, or of actions where they are among them, and beside them those of the others.

    Attributes:
        each: By mode, in the order of the flag.
    """

    def __init__(self, each: Sequence[Anchors]) -> None:
        self.each = each
        self._first = next((anchors for anchors in each if anchors.retained.mode == Action.mode), each[0])
        for other in each:
            same = list(other.tasks) == list(self._first.tasks) and other.instructions.equal(self._first.instructions)
            if not same or not other.cross.equal(self._first.cross):
                raise CraftError(
                    f"{other.directory} and {self._first.directory} hold different anchors: modes that are retained "
                    "together need caches that were built with the same flags"
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._first, name)

    @property
    def stored_bytes(self) -> int:
        """The sum over all caches."""
        return sum(anchors.stored_bytes for anchors in self.each)

    def hold_out(self, indices: Tensor) -> None:
        """Leave these anchors out of all steps, under every mode."""
        for anchors in self.each:
            anchors.hold_out(indices)

    def costs(self) -> list[Cost]:
        """One entry per mode."""
        return [
            Cost(f"{cost.what} ({anchors.retained.mode})", cost.bytes)
            for anchors in self.each
            for cost in anchors.costs()
        ]

    def identity(self) -> dict[str, Any]:
        """By mode."""
        return {anchors.retained.mode: anchors.identity() for anchors in self.each}


def mode_of(anchors: Anchors) -> str:
    """What is retained, as `--craft.retention_mode` names it."""
    return "+".join(a.retained.mode for a in (anchors.each if isinstance(anchors, SeveralAnchors) else [anchors]))


def open_all(context: Context) -> tuple[Anchors, list[Anchors]]:
    """What the method holds as one, and the anchors of each mode that `--craft.retention_mode` names."""
    each = [open_anchors(dataclasses.replace(context, config=own)) for own in context.config.by_mode()]
    return (each[0] if len(each) == 1 else SeveralAnchors(each)), each  # type: ignore[return-value]  # delegates the rest
