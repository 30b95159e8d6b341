from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.images import decode_image, decode_images, encode_image, encode_images
from lerobot_craft.errors import CraftError

SHAPES = [(3, 7, 5), (1, 4, 9), (2, 3, 8, 6), (3, 1, 5, 5), (1, 3, 2, 2)]


def noise(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("shape", SHAPES)
def test_images_come_back_bit_for_bit(shape):
    images = noise(4, *shape)
    assert torch.equal(decode_images(encode_images(images), shape), images)


def test_threads_change_nothing():
    images = noise(9, 3, 6, 6)
    with ThreadPoolExecutor(3) as pool:
        column = encode_images(images, pool)
        assert torch.equal(column.values, encode_images(images).values)
        assert torch.equal(decode_images(column, (3, 6, 6), pool), images)


def test_images_need_not_be_contiguous():
    image = noise(5, 7, 3).permute(2, 0, 1)
    assert torch.equal(decode_image(encode_image(image), image.shape), image)


def test_a_smooth_image_is_stored_small():
    assert len(encode_image(torch.full((3, 64, 64), 200, dtype=torch.uint8))) < 64 * 64 * 3 / 20


def test_no_images_are_no_images():
    column = Ragged(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    assert decode_images(column, (3, 4, 4)).shape == (0, 3, 4, 4)


@pytest.mark.parametrize("image", [torch.rand(3, 4, 4), torch.zeros(3, 4, 4, dtype=torch.int64)])
def test_only_uint8_images_are_kept(image):
    with pytest.raises(ValueError, match="uint8"):
        encode_image(image)


@pytest.mark.parametrize("shape", [(4, 4), (2, 4, 4), (4, 4, 3), (1, 1, 3, 4, 4), (3, 0, 4)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="channels"):
        encode_image(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 7, 5), (2, 3, 7, 5), (3, 7, 6)])
def test_another_shape_than_declared_is_refused(shape):
    with pytest.raises(CraftError, match="manifest declares"):
        decode_image(encode_image(noise(3, 7, 5)), shape)


def test_damage_is_refused_or_harmless(capfd):
    data = encode_image(noise(3, 7, 5))
    for place in range(len(data)):
        broken = data.clone()
        broken[place] ^= 0x10
        try:
            assert decode_image(broken, (3, 7, 5)).shape == (3, 7, 5)
        except CraftError:
            continue
    for length in range(0, len(data) - 12, 5):  # the last chunk of 12 bytes carries nothing
        with pytest.raises(CraftError):
            decode_image(data[:length], (3, 7, 5))
    capfd.readouterr()  # libpng also writes to stderr
