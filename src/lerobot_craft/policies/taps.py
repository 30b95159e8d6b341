"""Read hidden states from a forward pass of other code, and stop it once they are read.

lerobot's pi0, pi05 and smolvla access the parts of their transformer layers instead of calling the layers, so hooks on
layers never fire. They do call their norm modules, and the input of the norm after a layer is that layer's output. So a
tap is a forward-pre-hook on the module that receives the wanted value.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

_COMPILED = "_torchdynamo_orig_callable"  # on what torch.compile makes of a function


class _ReachedLastTapError(Exception):
    """Ends a forward pass early. Autograd's graph up to here stays, so gradients equal those of a full pass."""


class Captured[Key](dict[Key, Tensor]):
    """The first value at each tap only: gradient checkpointing runs a layer again during backward."""


@contextmanager
def taps[Key](points: Mapping[Key, nn.Module], *, stop: bool = False) -> Iterator[Captured[Key]]:
    """Capture the first positional input of each module in `points` during a forward pass in this context.

    Args:
        points: Name of a value -> the module that receives it.
        stop: End the forward pass once every point was seen; the rest of the `with` body is skipped.
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
        # Gradient checkpointing enters its contexts from a generator. The exception leaves it suspended there while the
        # traceback lives, and it would pack every tensor that later passes save for backward.
        clear_frames(reached.__traceback__)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """All outputs of a module, in order, during forward passes in this context."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def embedded_once(module: Any) -> Generator[None]:
    """Let `module.embed_image` compute equal images once within this context, e.g. for passes that differ in noise."""
    embed, seen = module.embed_image, list[tuple[Tensor, Tensor]]()

    def once(image: Tensor) -> Tensor:
        for known, result in seen:
            if known.dtype == image.dtype and torch.equal(known, image):
                return result
        embedded: Tensor = embed(image)
        seen.append((image, embedded))
        return embedded

    module.embed_image = once
    try:
        yield
    finally:
        del module.embed_image  # the class's own shows again


@contextmanager
def mode(policy: nn.Module, *, train: bool) -> Generator[None]:
    """Train or eval mode in this context, without torch.compile. The policy's own `train` decides about frozen parts.

    Compiled code skips hooks and rounds differently, so student and teacher would not agree.
    """
    was_training = policy.training
    if was_training != train:
        policy.train(train)
    try:
        with uncompiled(policy):
            yield
    finally:
        if was_training != train:
            policy.train(was_training)


@contextmanager
def uncompiled(policy: nn.Module) -> Generator[None]:
    """A policy with `compile_model` as it was written, within the context.

    lerobot puts `torch.compile(self.forward)` into the instance, in front of the method of the class.
    """
    taken = remove_compiled(policy)
    try:
        yield
    finally:
        for module, name, compiled in taken:
            setattr(module, name, compiled)


def remove_compiled(policy: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Take compiled methods out of a policy: of which module, by what name, and what they were.

    A copy of a compiled policy needs this: its compiled methods are those of the original, with the original's weights.
    """
    if not getattr(getattr(policy, "config", None), "compile_model", False):
        return []
    taken = [
        (module, name, value)
        for module in policy.modules()
        for name, value in vars(module).items()
        if hasattr(value, _COMPILED)
    ]
    for module, name, _ in taken:
        delattr(module, name)
    return taken


@contextmanager
def eager_attention(*configs: Any) -> Generator[None]:
    """Eager attention in this context.

    pi0 and pi05 train with it, but their prefix alone would use another kernel, and sampling an action switches it
    permanently. Forcing it makes prefix and joint passes bit-identical, before and after sampling.
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
    """[B, T, ...] -> an all-True mask [B, T]."""
    return torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
