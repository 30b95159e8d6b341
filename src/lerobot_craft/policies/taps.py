"""Read hidden states from a forward pass of other code, and stop it once they are read.

lerobot's pi0, pi05 and smolvla access the parts of their transformer layers instead of calling the layers, so hooks on
layers never fire. They do call their norm modules, and the input of the norm after a layer is that layer's output. So a
tap is a forward-pre-hook on the module that receives the wanted value.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from traceback import clear_frames
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

IMAGES_KEPT_BYTES = 2**30  # of anchors, embedded
_COMPILED = "_torchdynamo_orig_callable"  # on what torch.compile makes of a function


class ImageEmbedder(NamedTuple):
    """What turns images into tokens."""

    module: Any  # its `embed_image` takes the images of one camera, [B, C, H, W], and returns tokens, [B, n, D]
    parts: Sequence[nn.Module]  # what it uses


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
    with _embedded_by(module, lambda image, position: module.embed_image(image)):
        yield


@contextmanager
def _embedded_by(module: Any, embed: Callable[[Tensor, int], Tensor]) -> Generator[None]:
    """Let `embed` do the work of `module.embed_image` within this context; equal images are embedded once.

    Args:
        module: What embeds images.
        embed: Takes the images and the position of the call among all calls in this context. While it runs,
            `module.embed_image` is what it was before.
    """
    seen, positions, before = list[tuple[Tensor, Tensor]](), count(), vars(module).get("embed_image")

    def restore() -> None:
        del module.embed_image  # the class's own shows again
        if before is not None:
            module.embed_image = before

    def once(images: Tensor) -> Tensor:
        position = next(positions)
        for known, result in seen:
            if known.dtype == images.dtype and torch.equal(known, images):
                return result
        restore()
        try:
            embedded = embed(images, position)
        finally:
            module.embed_image = once
        seen.append((images, embedded))
        return embedded

    module.embed_image = once
    try:
        yield
    finally:
        restore()


class KnownImages:
    """What an untrained vision tower makes of anchors' images: computed at the first visit, then looked up.

    Every image is embedded by itself, so its bits do not depend on the others of a batch: a resumed run and any number
    of ranks get the same ones.

    Args:
        embedder: What embeds images. None, or if a part of it is trained or drops values: nothing is looked up.
        limit: Bytes that are kept at most.
    """

    def __init__(self, embedder: ImageEmbedder | None, limit: int = IMAGES_KEPT_BYTES) -> None:
        constant = embedder is not None and all(map(_is_constant, embedder.parts))
        self._module = embedder.module if embedder is not None and constant else None
        self._limit = limit
        self._kept: dict[tuple[Any, ...], Tensor] = {}  # by anchor, camera and precision, on the host
        self.nbytes = 0

    @property
    def looks_up(self) -> bool:
        """Whether any image is."""
        return self._module is not None

    @contextmanager
    def of(self, anchors: Sequence[int] | None, module: Any | None = None) -> Generator[None]:
        """Look up embeddings within this context.

        Args:
            anchors: Whose images pass, in the order of the batch; None: unknown, so nothing is looked up.
            module: A copy of the module with the same weights, which embeds them; None: the module itself.
        """
        if self._module is None or anchors is None:
            yield
            return
        module = self._module if module is None else module

        def look_up(images: Tensor, position: int) -> Tensor:
            device = images.device.type
            precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else images.dtype
            each = zip(anchors, images.split(1), strict=True)
            tokens = [self._embedded(module, image, (anchor, position, precision)) for anchor, image in each]
            return torch.cat(tokens).to(images.device)

        with _embedded_by(module, look_up):
            yield

    def _embedded(self, module: Any, image: Tensor, key: tuple[Any, ...]) -> Tensor:
        """[1, tokens, D] on the host."""
        if (known := self._kept.get(key)) is not None:
            return known
        with torch.no_grad():
            embedded: Tensor = module.embed_image(image).cpu()
        if self.nbytes + embedded.nbytes <= self._limit:
            self._kept[key] = embedded
            self.nbytes += embedded.nbytes
        return embedded


def _is_constant(module: nn.Module) -> bool:
    # transformers' attention keeps the rate of its dropout as a number
    rates = [getattr(part, "p" if isinstance(part, nn.Dropout) else "dropout", 0) for part in module.modules()]
    drops = any(isinstance(rate, float) and rate > 0 for rate in rates)
    return not drops and not any(parameter.requires_grad for parameter in module.parameters())


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
