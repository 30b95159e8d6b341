"""Images in a cache: uint8 and lossless, one PNG per anchor.

An anchor's image is [C, H, W] with 1 or 3 channels, or [S, C, H, W] with S observation steps, stacked into one PNG.
"""

import struct
from collections.abc import Sequence
from concurrent.futures import Executor

import torch
from torch import Tensor
from torchvision.io import decode_png, encode_png

from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.errors import CraftError

_COLOUR_TYPES = {1: 0, 3: 2}  # channels -> PNG's number for gray and RGB
# zlib level: 3 took half the time of 6 for 15 % more bytes on a noisy 256 x 256 camera image.
_COMPRESSION_LEVEL = 3


def encode_image(image: Tensor) -> Tensor:
    """One uint8 image [C, H, W] or [S, C, H, W] as PNG bytes, uint8 [length]."""
    if image.dtype != torch.uint8:
        raise ValueError(f"images in a cache are uint8, as the camera gave them; got {image.dtype}")
    if not is_image_shape(image.shape):
        raise ValueError(f"expected [C, H, W] or [S, C, H, W] with 1 or 3 channels; got {tuple(image.shape)}")
    *_, channels, height, width = image.shape
    steps = image.reshape(-1, channels, height, width)  # [S, C, H, W]
    tall = steps.transpose(0, 1).reshape(channels, -1, width)  # [C, S * H, W]
    encoded: Tensor = encode_png(tall.cpu().contiguous(), compression_level=_COMPRESSION_LEVEL)
    return encoded


def is_image_shape(shape: Sequence[int]) -> bool:
    """Whether a PNG can hold this shape: [C, H, W] or [S, C, H, W]."""
    return len(shape) in (3, 4) and shape[-3] in _COLOUR_TYPES and min(shape) > 0


def decode_image(data: Tensor, shape: Sequence[int]) -> Tensor:
    """Decode PNG bytes to a uint8 image of the given shape, [C, H, W] or [S, C, H, W]."""
    *steps, channels, height, width = shape
    tall_height = height * (steps[0] if steps else 1)
    # Checked before decoding: a damaged header could request any amount of memory.
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">IIBB", width, tall_height, 8, _COLOUR_TYPES[channels])
    if data[: len(header)].numpy().tobytes() != header:
        raise CraftError(f"An image of the cache is not the PNG of shape {list(shape)} that its manifest declares.")
    try:
        tall: Tensor = decode_png(data)  # [C, S * H, W]
    except RuntimeError as error:
        raise CraftError(f"An image of the cache is damaged ({error}). Check it with `craft cache verify`.") from error
    if tall.shape != (channels, tall_height, width):
        raise CraftError(f"An image of the cache decodes to {list(tall.shape)} instead of {list(shape)}.")
    return tall.reshape(channels, -1, height, width).transpose(0, 1).reshape(tuple(shape))


def encode_images(images: Tensor, executor: Executor | None = None) -> Ragged:
    """PNG column of n >= 1 images, [n, C, H, W] or [n, S, C, H, W]; uses the executor's threads if given."""
    encode = map if executor is None else executor.map
    return Ragged.of(list(encode(encode_image, images)))


def decode_images(column: Ragged, shape: Sequence[int], executor: Executor | None = None) -> Tensor:
    """Images [n, *shape] of a PNG column; uses the executor's threads if given."""
    decode = map if executor is None else executor.map
    images = list(decode(lambda data: decode_image(data, shape), column.rows()))
    return torch.stack(images) if images else torch.empty((0, *shape), dtype=torch.uint8)
