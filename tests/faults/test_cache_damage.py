"""A thousand ways to damage a cache: each is refused with a sentence, or the rows that come out are the right ones."""

import random
import shutil

import pytest
import torch

from lerobot_craft.anchors.columns import concatenate
from lerobot_craft.anchors.manifest import shard_name
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import checksum_path, write_checksum
from tests.anchors.small_cache import assert_same_columns, build_cache, put

SHARDS = [shard_name(index) for index in range(3)]
FILES = ["manifest.json", "manifest.sha256", *SHARDS]


def flip_bits(cache, rng):
    path = cache / rng.choice(FILES)
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    put(path, data)


def flip_bits_of_a_header(cache, rng):
    path = cache / rng.choice(SHARDS)
    data = bytearray(path.read_bytes())
    data[rng.randrange(8 + int.from_bytes(data[:8], "little"))] ^= 1 << rng.randrange(8)
    put(path, data)


def truncate(cache, rng):
    path = cache / rng.choice(FILES)
    put(path, path.read_bytes()[: rng.randrange(path.stat().st_size)])


def lengthen(cache, rng):
    path = cache / rng.choice(FILES)
    put(path, path.read_bytes() + rng.randbytes(rng.randint(1, 100)))


def empty(cache, rng):
    put(cache / rng.choice(FILES), b"")


def remove(cache, rng):
    for name in rng.sample(FILES, rng.randint(1, len(FILES))):
        (cache / name).unlink()


def swap_shards(cache, rng):
    first, second = (cache / name for name in rng.sample(SHARDS, 2))
    one, other = first.read_bytes(), second.read_bytes()
    put(first, other)
    put(second, one)


def put_one_shard_over_another(cache, rng):
    source, target = (cache / name for name in rng.sample(SHARDS, 2))
    put(target, source.read_bytes())


def overwrite_a_stretch(cache, rng):
    path = cache / rng.choice(FILES)
    data = bytearray(path.read_bytes())
    begin = rng.randrange(len(data))
    data[begin : begin + rng.choice((16, 512))] = bytes(min(rng.choice((16, 512)), len(data) - begin))
    put(path, data)


def duplicate_a_shard(cache, rng):
    source = cache / rng.choice(SHARDS)
    shutil.copy(source, cache / rng.choice([shard_name(3), f"copy of {source.name}", f"{source.name}.bak"]))


def add_a_file(cache, rng):
    name = rng.choice([".DS_Store", "notes.txt", "pytorch_model.bin", ".shard-00000.safetensors.tmp", "build.json"])
    (cache / name).write_bytes(rng.randbytes(rng.randint(0, 200)))


def add_a_checksum(cache, rng):
    path = cache / rng.choice(SHARDS)
    write_checksum(path)
    if rng.random() < 0.5:
        data = bytearray(checksum_path(path).read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        put(checksum_path(path), data)


MUTATIONS = (
    *(flip_bits, flip_bits, flip_bits_of_a_header, truncate, lengthen, empty, remove, swap_shards),
    *(put_one_shard_over_another, overwrite_a_stretch, duplicate_a_shard, add_a_file, add_a_checksum),
)


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("intact")
    return directory, concatenate(build_cache(directory))


def outcome(cache, originals):
    try:
        store = AnchorStore.open(cache)
        found = store.take(torch.arange(len(store)))
    except CraftError as error:
        return "refused" if str(cache) in str(error) and "\n" not in str(error) else f"unclear: {error}"
    try:
        assert_same_columns(found, originals)
    except AssertionError:
        return "wrong"
    return "harmless"


def damage(intact, tmp_path, number):
    """One mutation, by its number; its name, and what became of it."""
    rng = random.Random(number)  # noqa: S311  # the same each time
    cache = shutil.copytree(intact[0], tmp_path / str(number))
    mutation = MUTATIONS[number % len(MUTATIONS)]
    mutation(cache, rng)
    found = outcome(cache, intact[1])
    shutil.rmtree(cache)
    return mutation.__name__, found


@pytest.mark.parametrize("times", [130, pytest.param(1000, marks=pytest.mark.slow)])  # slow: some ten seconds
def test_damage_is_refused_or_harmless(intact, tmp_path, tally, times):
    outcomes = [damage(intact, tmp_path, number) for number in range(times)]
    if times == 1000:
        for _, found in outcomes:
            tally.add("damage to a cache", found)
    assert [pair for pair in outcomes if pair[1] not in ("refused", "harmless")] == []
    harmless = {name for name, found in outcomes if found == "harmless"}
    assert harmless == {"duplicate_a_shard", "add_a_file", "add_a_checksum"}, "and only what is beside the cache"
    assert sum(found == "refused" for _, found in outcomes) > times // 2
