"""What must be the same on every rank of a run."""

import hashlib
import json
from typing import TYPE_CHECKING

from torch import Tensor

from lerobot_craft.core.divergence import find_divergence
from lerobot_craft.errors import CraftError
from lerobot_craft.training.output.checkpoints import last_checkpoint, resume_command

if TYPE_CHECKING:
    from lerobot_craft.training.session import Session

_STATE = "the state of the method (multipliers, step)"


def require_agreement(session: "Session") -> None:
    """Stop, on every rank, if one holds other weights or multipliers than the rest; a collective.

    Raises:
        CraftError: It names the rank, the step and the first tensor that differs.
    """
    held: dict[str, Tensor] = {name: p for name, p in session.student.named_parameters() if p.requires_grad}
    if session.masters is not None:
        held |= {f"the float32 copy of {name}": copy for name, copy in session.masters.copies.items()}
    found = find_divergence(held, {_STATE: _digest(session.method.state_dict())})
    if found is None:
        return
    ranks = f"rank{'s' if len(found.ranks) > 1 else ''} {', '.join(map(str, found.ranks))}"
    saved = last_checkpoint(session.cfg.output_dir)
    way_on = f"go on from the last checkpoint with `{resume_command(saved)}`" if saved else "start again"
    raise CraftError(
        f"after step {session.step} the weights on {ranks} are not those of the other {_others(session, found.ranks)} "
        f"(first: {found.first}), so this is not one policy any more, and it was not saved: look at the memory and the "
        f"library versions of that machine, then {way_on}"
    )


def _others(session: "Session", ranks: list[int]) -> str:
    count = session.accelerator.num_processes - len(ranks)
    return f"{count} rank{'s' if count > 1 else ''}"


def _digest(state: dict[str, object]) -> int:
    """64 bits with a sign."""
    content = json.dumps(state, sort_keys=True).encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], signed=True)
