"""Does the policy run with the weights in its file?

lerobot's pi0 family silently uses random weights if the file is missing or does not match, so every entry is compared.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.policies import WEIGHTS_FILE, checkpoint_sources

_NAMES_SHOWN = 3
_BLOCK = 2**20  # numbers that are compared at a time; they stay in a core's cache
_MISSING = "missing from the file, so their values are random"
_LEFT_OVER = "in the file, but the policy has no place for them"
_SHAPE = "of another shape in the file"
_NOT_FINITE = "holding NaN or infinity"
_DIFFERENT = "not what the file says"
_KINDS = (_MISSING, _LEFT_OVER, _SHAPE, _NOT_FINITE, _DIFFERENT)


def require_weights(directory: Path) -> None:
    """Refuse a checkpoint without a readable weights file, before any slow work.

    Raises:
        CraftError: The file is missing or damaged, or the directory holds a PEFT adapter.
    """
    with _open_weights(directory):
        pass


def check_weights(policy: nn.Module, directory: Path) -> None:
    """Refuse a policy whose parameters and saved buffers do not equal those of its checkpoint.

    Each entry of `policy.state_dict()` must equal, in the policy's dtype, the file's tensor that the policy's own
    loader maps to it. Entries tied to another one may be missing from the file. Buffers that are never saved are
    computed by the constructor and not checked. The file is memory-mapped and read tensor by tensor.

    Raises:
        CraftError: Tensors are missing, unexpected, of another shape, not finite, or different from the file.
    """
    with _open_weights(directory) as file:
        # lerobot's loaders get the tensors from safetensors in byte order.
        names = file.offset_keys()
        sources = checkpoint_sources(policy, names)
        state = policy.state_dict()
        loaded = {_memory(state[entry]) for entry in sources if entry in state}
        troubles: defaultdict[str, list[str]] = defaultdict(list)
        for entry, tensor in state.items():
            if entry in sources:
                trouble = _trouble(tensor, file.get_tensor(sources[entry]))
            else:
                trouble = None if _memory(tensor) in loaded else _MISSING
            if trouble:
                troubles[trouble].append(entry)
        used = {source for entry, source in sources.items() if entry in state}
        troubles[_LEFT_OVER] += [name for name in names if name not in used]
    if any(troubles.values()):
        raise CraftError(_refusal(directory / WEIGHTS_FILE, troubles))


@contextlib.contextmanager
def _open_weights(directory: Path) -> Iterator[Any]:  # safe_open has no types
    file = directory / WEIGHTS_FILE
    if (directory / "adapter_config.json").exists():
        raise CraftError(
            f"{directory} holds a PEFT adapter, not a whole policy. Merge it first: load it with lerobot, then "
            "`merged = policy.merge_and_unload(); merged.config.use_peft = False; merged.save_pretrained(DIR)`; copy "
            "the policy_*processor* files into DIR and use that."
        )
    if not file.is_file():
        raise CraftError(
            f"There is no {WEIGHTS_FILE} in {directory}, so the policy would run with random weights. Copy the "
            "checkpoint again with all of its files."
        )
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CraftError(f"{file} cannot be read ({error}). Copy the checkpoint again.") from error


def _trouble(tensor: Tensor, in_file: Tensor) -> str | None:
    if tensor.shape != in_file.shape:
        return _SHAPE
    equal = True
    # Block by block: what a comparison keeps on the side is 2.4 times as large as the tensor, and some have a gigabyte.
    blocks = (each.reshape(-1).split(_BLOCK) for each in (tensor.detach().cpu(), in_file))
    for here, there in zip(*blocks, strict=True):
        if not _is_finite(here):
            return _NOT_FINITE
        equal = equal and torch.equal(here, there.to(here.dtype))
    return None if equal else _DIFFERENT


def _is_finite(block: Tensor) -> bool:
    """Whether no number is NaN or infinite. `aminmax` hands NaN on, and takes a fourteenth of `isfinite`'s time."""
    if not block.is_floating_point() or not block.numel():
        return True
    low, high = block.aminmax()
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """A key that tied entries share."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _refusal(file: Path, troubles: dict[str, list[str]]) -> str:
    found = "; ".join(f"{_count(troubles[kind])} {kind}: {_some(troubles[kind])}" for kind in _KINDS if troubles[kind])
    return (
        f"The policy does not run with the weights of {file}: {found}. Copy the checkpoint again; if its config.json "
        "or lerobot is of another time, load it there and save it anew with save_pretrained."
    )


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN
    return ", ".join(ordered[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
