"""Fingerprints of a teacher: one SHA-256 for each part that affects its answers.

They tell whether a cache belongs to a teacher. They do not depend on the checkpoint's path or the device.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from lerobot_craft.lerobot_api.policies import state_below_adapters
from lerobot_craft.lerobot_api.processors import Processor
from lerobot_craft.teacher.processors import step_tensors, steps, tokenizers

_THREADS = min(8, os.cpu_count() or 1)
_BLOCK = 2**24  # bytes per thread and turn: one core needs many seconds for 3.45 billion weights
_REBUILD = "build it again with `craft cache build`"
# Part -> what a difference means.
_DIFFERENCES = {
    "weights": f"the cache was built by another teacher, its weights differ: {_REBUILD}, or name the teacher it was "
    "built by with --policy.path",
    "stats": "the cache was built with other normalization statistics: use --craft.normalization=keep, or " + _REBUILD,
    "tokenizers": f"the cache was built with other tokenizers: use the checkpoint's own ones, or {_REBUILD}",
    "processors": f"the cache was built with other processor steps or settings: {_REBUILD}",
}


def fingerprint(policy: nn.Module, preprocessor: Processor, postprocessor: Processor) -> dict[str, str]:
    """SHA-256 of each part of a teacher.

    Args:
        policy: The policy; its dtype matters, its device does not.
        preprocessor: Turns a raw batch into the policy's inputs.
        postprocessor: Turns the policy's actions into the robot's.

    Returns:
        `weights` (names, dtypes, shapes, bytes), `stats` (the normalizers' tensors), `tokenizers` (content and call
        settings) and `processors` (steps and settings), each as 64 hexadecimal digits.
    """
    both = (preprocessor, postprocessor)
    stats = [
        (f"{side}.{name}", tensor)
        for side, processor in zip(("pre", "post"), both, strict=True)
        for name, tensor in step_tensors(processor)
    ]
    return {
        "weights": fingerprint_of_weights(policy),
        "stats": _digest_of_tensors(stats),
        "tokenizers": _digest_of_json([tokenizers(processor) for processor in both]),
        "processors": _digest_of_json([steps(processor) for processor in both]),
    }


def fingerprint_of_weights(policy: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a policy's state; below PEFT's adapters, if it has some."""
    return _digest_of_tensors(sorted(state_below_adapters(policy).items()))


def identity(parts: Mapping[str, str]) -> str:
    """One SHA-256 of all parts: identifies the policy independently of path and device."""
    return hashlib.sha256("".join(parts[name] for name in sorted(parts)).encode()).hexdigest()


def compare(cached: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """Sentences on how the teacher of a cache differs from the present one; empty if it is the same."""
    return [sentence for part, sentence in _DIFFERENCES.items() if cached.get(part) != present.get(part)]


def _digest_of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_THREADS) as pool:
        for name, tensor in tensors:
            # The header fixes the number of bytes, so different lists of tensors cannot give the same stream.
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            flat = tensor.detach().cpu().contiguous().reshape(-1)
            blocks = flat.view(torch.uint8).split(_BLOCK)  # as bytes: numpy has no bfloat16
            for block in pool.map(_digest_of_bytes, blocks) if len(blocks) > 1 else map(_digest_of_bytes, blocks):
                digest.update(block)
    return digest.hexdigest()


def _digest_of_bytes(block: Tensor) -> bytes:
    return hashlib.sha256(block.numpy().data).digest()  # releases the GIL


def _digest_of_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
