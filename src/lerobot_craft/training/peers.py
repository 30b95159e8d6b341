"""The other processes of a run: when one is gone, the rest stop at once and say which it was, and why if it said so."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lerobot_craft.core.ranks import world_size
from lerobot_craft.errors import CraftError
from lerobot_craft.training.output.checkpoints import last_checkpoint, resume_command

_ANSWER = timedelta(seconds=10)  # ranks meet a broken connection within moments of each other
_GLOO = "gloo"  # its errors are plain RuntimeErrors that name their source file


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
    try:
        yield
    except BaseException as error:
        if not _is_broken_connection(error):
            _leave_word(error)
            raise
        raise CraftError(_sentence(_gone(), output_dir)) from error


def _is_broken_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def _leave_word(error: BaseException) -> None:
    word = " ".join(str(error).split()) or type(error).__name__
    with suppress(RuntimeError):  # the store may be gone too; what this rank ended with is what counts
        _store().set(_key("word", dist.get_rank()), word)


def _gone() -> dict[int, str | None]:
    """Ranks that do not answer, each with its last word."""
    rank = dist.get_rank()
    try:
        store = _store()
        store.set(_key("here", rank), "")
    except RuntimeError:
        return {0: None}  # whose process holds the store, unless a launcher does; that would have ended us all
    gone: dict[int, str | None] = {}
    for other in (other for other in range(world_size()) if other != rank):
        try:
            if store.check([_key("word", other)]):
                gone[other] = store.get(_key("word", other)).decode()
            else:
                store.wait([_key("here", other)], _ANSWER)
        except RuntimeError:
            gone[other] = None
    return gone


def _sentence(gone: dict[int, str | None], output_dir: Path) -> str:
    silent = "is gone without a word (killed, or out of memory)"
    who = "; ".join(
        f"rank {rank} of {world_size()} {silent if word is None else f'stopped: {word}'}" for rank, word in gone.items()
    )
    saved = last_checkpoint(output_dir)
    way_on = (
        f"go on from {saved} by launching `{resume_command(saved)}` as before"
        if saved
        else "no checkpoint had been written yet: start again"
    )
    return f"{who or 'the connection between the ranks broke'}, so rank {dist.get_rank()} stops too; {way_on}"


def _key(what: str, rank: int) -> str:
    return f"craft/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{what}/{rank}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
