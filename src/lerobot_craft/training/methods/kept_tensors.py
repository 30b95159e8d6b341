"""Tensors that a run keeps in a file beside its checkpoints, because after a resume nothing could give them again."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import plain_errors, require_file, sha256_of, sync_directory, temporary_path
from lerobot_craft.training.methods.method import Context

START_WEIGHTS = "start_weights.safetensors"


class KeptTensors:
    """A file in the run's output directory, whole or absent.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def sha256(self) -> str:
        """Of the file; a checkpoint records it, so that a resumed run cannot go on from another one."""
        return sha256_of(self.path)

    def require(self, sha256: Any) -> None:
        """Refuse a file that is not the one of the checkpoint."""
        if sha256 != self.sha256:
            raise CraftError(
                f"{self.path} is not the file that this run was started with. Put the original back, or start a new "
                "run in another --output_dir."
            )

    def tensors(self, names: Iterable[str]) -> Iterator[Tensor]:
        """Tensors by their names, one after the other, on the CPU."""
        with _opened(self.path) as file:
            for name in names:
                yield file.get_tensor(name)

    def like(self, expected: Mapping[str, Tensor]) -> list[Tensor]:
        """The tensors of the names in `expected`, each on the device of its counterpart."""
        return [
            kept.to(tensor.device)
            for kept, tensor in zip(self.tensors(expected), expected.values(), strict=True)  # order of the mapping
        ]


def keep(context: Context, file: str, tensors: Mapping[str, Tensor]) -> KeptTensors:
    """Write tensors as `<output_dir>/file` on the main process; every process comes back once they are there."""
    kept = KeptTensors(Path(context.train.output_dir) / file)
    if context.accelerator.is_main_process:
        _write(kept.path, tensors)
    context.accelerator.wait_for_everyone()
    return kept


def reopen(context: Context, file: str, expected: Mapping[str, Tensor]) -> KeptTensors:
    """`<output_dir>/file` of an earlier run, if it holds exactly the names, shapes and dtypes of `expected`."""
    kept = KeptTensors(Path(context.train.output_dir) / file)
    if not kept.path.is_file():
        raise CraftError(
            f"There is no {kept.path}, which --craft.method={context.config.method} wrote before the first step and "
            "needs to go on. Copy it from where the run was started, or start a new run in another --output_dir."
        )
    with _opened(kept.path) as opened:
        held = set(opened.keys())
    odd = held ^ set(expected)
    if not odd:
        pairs = zip(expected.items(), kept.tensors(expected), strict=True)
        odd = {name for (name, a), b in pairs if a.shape != b.shape or a.dtype != b.dtype}
    if odd:
        raise CraftError(
            f"{kept.path} does not fit what is trained now: {min(odd)} is only in one of the two, or of another shape "
            "or dtype. Resume with the flags that the run was started with."
        )
    return kept


def keep_start(context: Context, tensors: Mapping[str, Tensor]) -> KeptTensors:
    """Values before the first step: written in a fresh run, opened in a resumed one.

    With PEFT no checkpoint holds them: adapters are drawn at random when they are made.
    """
    return (reopen if context.resumed else keep)(context, START_WEIGHTS, tensors)


def trained_parameters(context: Context) -> dict[str, Tensor]:
    """What the optimizer moves, by name, detached."""
    return {name: p.detach() for name, p in context.policy.named_parameters() if p.requires_grad}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:  # safe_open has no types
    require_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CraftError(f"{path} cannot be read ({error}). Copy it again from where the run was started.") from error


def _write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Not by `write_atomically`: that wants all bytes in memory, and these may be a whole policy."""
    temporary = temporary_path(path)
    with plain_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file({name: _storable(tensor) for name, tensor in tensors.items()}, temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)  # a full disk gets its space back
            if isinstance(error, OSError):
                raise
            raise CraftError(f"{path} cannot be written: {error}. Free some space, then start again.") from error
        sync_directory(path.parent)


def _storable(tensor: Tensor) -> Tensor:
    """Safetensors refuses gaps, and tensors that are parts of one memory."""
    tensor = tensor.detach().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
