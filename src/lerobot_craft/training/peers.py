"""The other processes of a run: when one is gone, the rest stop at once and say which it was, and why if it said so.

A rank whose connection breaks asks who is still there. Of the others some wait in a collective for a rank that lives,
or are at a long save: they have noticed nothing yet. So a thread of each rank answers in its place, through the store
that the ranks met in. Every thread hears all answers. A rank that notices only when its living neighbours have left
therefore knows what they knew.

What must be the same on every rank is compared by `require_agreement`.
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lerobot_craft.core.ranks import find_divergence, world_size
from lerobot_craft.errors import CraftError
from lerobot_craft.training.checkpoints import last_checkpoint, resume_command

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


_ANSWER = 10.0  # seconds that all ranks together have to answer
_LOOK = 0.5  # seconds between two looks whether anybody has asked
_BEAT = 0.05  # seconds between two looks for answers
_LONGEST = 3 * _ANSWER  # seconds: answers, word that all have heard them, and a busy machine
_GLOO = "gloo"  # its errors are plain RuntimeErrors that name their source file
_SHOWN = 200  # characters of an error that nobody died of


@contextmanager
def stops_with_its_peers(output_dir: Path) -> Iterator[None]:
    """Around a run of several processes: a broken connection becomes a sentence that names the rank that broke it.

    A rank that fails leaves word of why in the store that the ranks met in. One that is killed cannot: it is the one
    that does not answer when the others ask who is still there.

    Raises:
        CraftError: Another rank is gone.
    """
    if world_size() == 1:
        yield
        return
    call = RollCall(_store(), dist.get_rank(), world_size())
    try:
        yield
    except BaseException as error:
        if not _is_broken_connection(error):
            call.ask(_in_one_line(error))
            raise
        raise CraftError(_sentence(call.ask(), error, output_dir)) from error
    finally:
        call.end()


class RollCall:
    """Who of the ranks is there: asked by any of them, answered by a thread of each.

    Args:
        store: That all ranks met in.
        rank: This one.
        ranks: How many there are.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self._store = store.clone()  # a connection of its own: on the other one a call may be waiting
        self._rank = rank
        self._unheard = {other for other in range(ranks) if other != rank}
        self._words: dict[int, str] = {}
        # Until more is known. The store is in the process of rank 0, unless a launcher has it, and its end ends us all.
        self._gone: dict[int, str | None] = {0: None}
        self._my_word: str | None = None
        self._asks = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="roll call", daemon=True)
        self._thread.start()

    def ask(self, word: str | None = None) -> dict[int, str | None]:
        """Ranks that do not answer or have stopped, each with its last word; all living ranks learn the same.

        Args:
            word: The last word of this rank, if it is the one that stops.
        """
        self._my_word, self._asks = word, True
        self.end()
        return self._gone

    def end(self) -> None:
        """Nobody needs to be answered any more."""
        self._over.set()
        self._thread.join(_LONGEST)  # a machine that was unplugged keeps a look into its store waiting

    def _listen(self) -> None:
        try:
            while not self._over.wait(_LOOK):
                if self._store.check([_key("asked")]):
                    break
            else:
                if not self._asks:
                    return
            self._answer()
            self._gone = self._stopped()
        except RuntimeError:  # the store is gone
            if 0 not in self._unheard:  # it has heard enough and left; else it was the one, and nobody can be asked
                self._gone = self._stopped()

    def _answer(self) -> None:
        if self._my_word is not None:
            self._store.set(_key("word", self._rank), self._my_word)
        self._store.set(_key("here", self._rank), "")
        self._store.set(_key("asked"), "")
        living = set(self._unheard)
        for rank in self._arriving("here", self._unheard):
            if self._store.check([_key("word", rank)]):
                self._words[rank] = self._store.get(_key("word", rank)).decode()
        living -= self._unheard
        # The process with the store may not leave before the others have read the answers.
        self._store.set(_key("heard", self._rank), "")
        for _ in self._arriving("heard", living):
            pass

    def _arriving(self, what: str, awaited: set[int]) -> Iterator[int]:
        """Ranks as they say `what`, taken out of those that are awaited; one deadline for all of them together."""
        deadline = time.monotonic() + _ANSWER
        while awaited and time.monotonic() < deadline:
            for rank in sorted(awaited):
                if self._store.check([_key(what, rank)]):
                    yield rank
                    awaited.remove(rank)
            time.sleep(_BEAT)

    def _stopped(self) -> dict[int, str | None]:
        gone: dict[int, str | None] = dict.fromkeys(self._unheard) | self._words
        return dict(sorted(gone.items()))


def _is_broken_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def _in_one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _sentence(gone: dict[int, str | None], error: BaseException, output_dir: Path) -> str:
    silent = "is gone without a word (killed, or out of memory)"
    who = "; ".join(
        f"rank {rank} of {world_size()} {silent if word is None else f'stopped: {word}'}" for rank, word in gone.items()
    )
    nobody = f"all {world_size()} ranks live, but a connection between them broke ({_in_one_line(error)[:_SHOWN]})"
    saved = last_checkpoint(output_dir)
    way_on = (
        f"go on from {saved} by launching `{resume_command(saved)}` as before"
        if saved
        else "no checkpoint had been written yet: start again"
    )
    return f"{who or nobody}, so rank {dist.get_rank()} stops too; {way_on}"


def _key(what: str, rank: int | str = "any") -> str:
    return f"craft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
