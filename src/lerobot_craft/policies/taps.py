"""Reading hidden states out of a forward pass that is not ours, and ending it once they are read.

lerobot's pi0, pi05 and smolvla reach into their transformer layers instead of calling them, so hooks on layers never
fire. Every one of them does call its normalization modules: what enters the norm after a layer IS that layer's
output. So a tap is a forward-pre-hook on the module that the wanted value enters.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn


class _ReachedLastTapError(Exception):
    """Ends a forward pass from within. Autograd's graph up to here stays, so gradients are those of a full pass."""


class Captured[Key](dict[Key, Tensor]):
    """What each tap saw, first visit only: gradient checkpointing runs a layer again during backward."""


@contextmanager
def taps[Key](points: Mapping[Key, nn.Module], *, stop: bool = False) -> Iterator[Captured[Key]]:
    """Capture the first positional input of each module in `points` during the forward pass within the context.

    Args:
        points: name of a value -> the module that it enters.
        stop: leave the forward pass as soon as every point has been seen. The rest of the body is not executed.
    """
    captured: Captured[Key] = Captured()

    def capture(key: Key) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            captured.setdefault(key, args[0])
            if stop and len(captured) == len(points):
                raise _ReachedLastTapError

        return hook

    handles = [module.register_forward_pre_hook(capture(key)) for key, module in points.items()]
    try:
        yield captured
    except _ReachedLastTapError as reached:
        # Gradient checkpointing enters its contexts from a generator, which an exception leaves suspended within them
        # for as long as the traceback lives. Then it would pack every tensor that any later pass saves for backward.
        clear_frames(reached.__traceback__)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Every output of a module during the forward pass within the context, in order."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def mode(policy: nn.Module, *, train: bool) -> Generator[None]:
    """Train or eval mode within the context; the policy's own `train` decides for parts that it keeps frozen."""
    was_training = policy.training
    if was_training != train:
        policy.train(train)
    try:
        yield
    finally:
        if was_training != train:
            policy.train(was_training)


@contextmanager
def eager_attention(*configs: Any) -> Generator[None]:
    """Plain attention within the context.

    pi0 and pi05 train with it, but their prefix alone would run with another kernel, and sampling an action switches
    it for good. Forcing it makes prefix and joint passes agree bit for bit, before and after sampling.
    """
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation


def token_count(outputs: list[Tensor]) -> list[int]:
    """[B, n, D] outputs of an image projector -> n for each image."""
    return [output.shape[1] for output in outputs]


def valid_everywhere(values: Tensor) -> Tensor:
    """[B, T, ...] -> a mask [B, T] without padding."""
    return torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
