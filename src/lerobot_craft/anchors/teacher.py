"""The teacher: the policy before fine-tuning, loaded, compared with its file, and fingerprinted.

lerobot's pi0 family silently uses random weights if the file is missing or does not match, so every entry is compared.

Fingerprints of a teacher: one SHA-256 for each part that affects its answers.

They tell whether a cache belongs to a teacher. They do not depend on the checkpoint's path or the device.
"""

import contextlib
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import (
    WEIGHTS_FILE,
    PolicyConfig,
    autocast,
    checkpoint_sources,
    load_policy,
    load_policy_config,
    state_below_adapters,
)
from lerobot_craft.lerobot_api.processors import Processor, ProcessorStep, is_normalizer, load_processors, step_name

_NAMES_SHOWN = 3
_COMPARED_AT_ONCE = 2**20  # numbers that are compared at a time; they stay in a core's cache
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
    blocks = (each.reshape(-1).split(_COMPARED_AT_ONCE) for each in (tensor.detach().cpu(), in_file))
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


# These settings do not affect what a step computes: its device, its tokenizer's location, a dataset's feature names.
_PLACES = {"device", "tokenizer_name", "action_tokenizer_name", "paligemma_tokenizer_name", "rename_map"}
# A fast tokenizer keeps the padding and truncation of its last call; the step sets both on every call.
_LAST_CALL = {"padding", "truncation"}
_FAST_NUMBERS = ("scale", "min_token", "max_token", "vocab_size")


def normalizer_stats(preprocessor: Processor) -> dict[str, dict[str, Tensor]]:
    """Feature -> statistic -> values that the teacher ships, on the CPU; empty if it ships none."""
    stats: dict[str, dict[str, Tensor]] = {}
    for step in filter(is_normalizer, preprocessor.steps):
        for key, values in step.state_dict().items():
            feature, _, stat = key.rpartition(".")
            stats.setdefault(feature, {})[stat] = values
    return stats


def step_tensors(processor: Processor) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a processor's steps, as `position.key`; in lerobot these are the statistics."""
    stateful = (step.state_dict() for step in processor.steps)
    for position, state in enumerate(filter(None, stateful)):
        yield from ((f"{position}.{key}", state[key]) for key in sorted(state))


def processor_steps(processor: Processor) -> list[dict[str, Any]]:
    """The steps in order, with settings; only the name for steps that tokenize: see `processor_tokenizers`."""
    return [
        {"step": step_name(step), "config": {} if _tokenizers_of(step) else _settings(step)} for step in processor.steps
    ]


def processor_tokenizers(processor: Processor) -> list[dict[str, Any]]:
    """The steps that tokenize, in order, with settings and the content of their tokenizers."""
    found = ((step, _tokenizers_of(step)) for step in processor.steps)
    return [
        {
            "step": step_name(step),
            "config": _settings(step),
            "fast_skip_tokens": getattr(step, "fast_skip_tokens", None),  # lerobot's own step omits it
            "tokenizers": {name: _content(tokenizer) for name, tokenizer in held.items()},
        }
        for step, held in found
        if held
    ]


def _settings(step: ProcessorStep) -> dict[str, Any]:
    return {key: value for key, value in step.get_config().items() if key not in _PLACES}


def _tokenizers_of(step: ProcessorStep) -> dict[str, Any]:
    return {name: value for name, value in vars(step).items() if _is_tokenizer(value)}


def _is_tokenizer(value: object) -> bool:
    return hasattr(value, "get_vocab") or hasattr(value, "bpe_tokenizer") or hasattr(value, "tokenizer")


def _content(tokenizer: Any) -> dict[str, Any]:
    """Everything that determines the ids of a text or an action chunk."""
    if hasattr(tokenizer, "bpe_tokenizer"):  # FAST: DCT coefficients, scaled and shifted, then BPE
        numbers = {name: getattr(tokenizer, name, None) for name in _FAST_NUMBERS}
        return {**numbers, "bpe": _content(tokenizer.bpe_tokenizer)}
    if hasattr(tokenizer, "tokenizer"):  # a processor for text and images
        return _content(tokenizer.tokenizer)
    content = {
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **{name: getattr(tokenizer, name, None) for name in ("vocab_size", "add_bos_token", "add_eos_token")},
    }
    if hasattr(tokenizer, "backend_tokenizer"):
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        return {**content, "backend": {key: value for key, value in backend.items() if key not in _LAST_CALL}}
    return {**content, "vocabulary": tokenizer.get_vocab()}


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
        "tokenizers": _digest_of_json([processor_tokenizers(processor) for processor in both]),
        "processors": _digest_of_json([processor_steps(processor) for processor in both]),
    }


def fingerprint_of_weights(policy: nn.Module) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a policy's state; below PEFT's adapters, if it has some."""
    return _digest_of_tensors(sorted(state_below_adapters(policy).items()))


def identity(parts: Mapping[str, str]) -> str:
    """One SHA-256 of all parts: identifies the policy independently of path and device."""
    return hashlib.sha256("".join(parts[name] for name in sorted(parts)).encode()).hexdigest()


def compare_fingerprints(cached: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
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


@dataclass(frozen=True)
class Teacher:
    """A checked policy with the processors and statistics it was trained with.

    Attributes:
        policy: In eval mode; the adapter's mode must be set by the caller.
        preprocessor: Raw batch -> the policy's inputs.
        postprocessor: The policy's actions -> the robot's.
        config: lerobot's config, with the checkpoint's features.
        fingerprint: Part -> SHA-256, see `lerobot_craft.anchors.teacher`.
    """

    policy: nn.Module
    preprocessor: Processor
    postprocessor: Processor
    config: PolicyConfig
    fingerprint: dict[str, str]


def load_teacher(path: str | Path, overrides: Sequence[str] = ()) -> Teacher:
    """Load, check and fingerprint the policy of a checkpoint. Needs no dataset.

    Args:
        path: A directory written by lerobot's `save_pretrained`, or a name on the Hub.
        overrides: Settings as on lerobot's command line without `policy.`, such as `--device=cpu`.

    Raises:
        CraftError: The checkpoint is incomplete, or the policy does not run with its weights.
    """
    config = load_policy_config(path, overrides)
    directory = Path(config.pretrained_path or path)  # for a policy from the Hub: its download directory
    require_weights(directory)
    policy = load_policy(config)
    check_weights(policy, directory)
    preprocessor, postprocessor = load_processors(config)
    return Teacher(policy, preprocessor, postprocessor, config, fingerprint(policy, preprocessor, postprocessor))


@torch.no_grad()
def executed_chunk(teacher: Teacher, policy: Any, batch: Any, seed: tuple[int, ...]) -> Tensor:
    """A teacher's chunk [B, H, A] as the robot executes it; its noise depends only on the seed.

    Args:
        teacher: Its processors and settings are used.
        policy: Its network, in eval mode.
        batch: Output of its preprocessor.
        seed: Seed of the noise.
    """
    mixed = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0] >> np.uint64(1))
    with torch.random.fork_rng(), autocast(teacher.config):
        torch.manual_seed(mixed)
        chunk = policy.predict_action_chunk(batch)
    executed: Tensor = teacher.postprocessor(chunk)
    return executed.float().cpu()
