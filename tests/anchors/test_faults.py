"""Whatever happens to the files of a cache, it is refused with a sentence: never a crash, never quietly wrong rows."""

import json
import os
import random
import shutil

import pytest

from lerobot_craft.anchors.manifest import BUILD_FILE, finished_shards, shard_name, write_shard
from lerobot_craft.anchors.store import AnchorStore
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import checksum_path, write_checksum
from tests.anchors.small_cache import NUM_ANCHORS, assert_refused, build_cache, make_columns, put, use

SHARD_FILES = [shard_name(index) for index in range(3)]
FILES = ["manifest.json", "manifest.sha256", *SHARD_FILES]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    directory = tmp_path_factory.mktemp("intact")
    build_cache(directory)
    return directory


@pytest.fixture
def cache(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "cache")


def regions(path):
    """Named stretches of a file: fields of the manifest, header and tensors of a shard."""
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        start = 8 + int.from_bytes(data[:8], "little")
        yield from (("length of the header", 0, 8), ("header", 8, start))
        for name, entry in json.loads(data[8:start]).items():
            begin, end = entry["data_offsets"]
            yield name, start + begin, start + end
    elif path.suffix == ".json":
        position = 0
        for line in data.splitlines(keepends=True):
            yield line.decode().strip(), position, position + len(line)
            position += len(line)
    else:
        yield from (("digest", 0, 64), ("name", 64, len(data)))


def test_the_intact_cache_is_accepted(cache):
    use(cache, verify=True)
    use(cache, verify=False)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_refused_wherever_it_is(cache, name, capfd):
    path = cache / name
    data = path.read_bytes()
    chosen = random.Random(name)  # noqa: S311
    mutations = 0
    for _, begin, end in regions(path):
        tries = 2 if path.suffix == ".json" else 12
        for place in {begin, end - 1, *(chosen.randrange(begin, end) for _ in range(tries))} if end > begin else ():
            flipped = bytearray(data)
            flipped[place] ^= chosen.choice((1, 2, 16, 128, 255))
            put(path, flipped)
            assert_refused(cache)
            mutations += 1
    assert mutations >= 20
    put(path, data)
    use(cache, verify=True)
    capfd.readouterr()  # libpng writes to stderr


def truncated(path):
    put(path, path.read_bytes()[:-1])


def halved(path):
    put(path, path.read_bytes()[: path.stat().st_size // 2])


def extended(path):
    put(path, path.read_bytes() + b"\0")


def emptied(path):
    put(path, b"")


def deleted(path):
    path.unlink()


def made_a_directory(path):
    path.unlink()
    path.mkdir()


def made_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def linked_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def linked_to_nothing(path):
    path.unlink()
    path.symlink_to("nowhere")


def zeroed(path):
    put(path, bytes(path.stat().st_size))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "fault",
    [
        truncated,
        halved,
        extended,
        emptied,
        deleted,
        made_a_directory,
        made_a_pipe,
        linked_to_itself,
        linked_to_nothing,
        zeroed,
    ],
)
def test_a_broken_file_is_refused(cache, name, fault, capfd):
    fault(cache / name)
    assert_refused(cache)
    capfd.readouterr()


def test_swapped_shards_are_refused(cache):
    (cache / SHARD_FILES[0]).rename(cache / "aside")
    (cache / SHARD_FILES[1]).rename(cache / SHARD_FILES[0])
    (cache / "aside").rename(cache / SHARD_FILES[1])
    assert_refused(cache)


def test_a_shard_of_another_cache_is_refused(cache):
    write_shard(cache, 1, make_columns(4, seed=99))
    assert_refused(cache)


@pytest.mark.parametrize("place", range(0, 85, 6))
def test_a_leftover_checksum_that_disagrees_is_refused(cache, place):
    path = cache / SHARD_FILES[0]
    write_checksum(path)
    use(cache, verify=True)
    sidecar = checksum_path(path)
    data = bytearray(sidecar.read_bytes())
    data[place] ^= 1
    sidecar.write_bytes(data)
    assert_refused(cache)


def test_a_cache_reached_through_links_is_accepted(cache, tmp_path):
    (tmp_path / "link").symlink_to(cache)
    (cache / SHARD_FILES[0]).rename(tmp_path / "elsewhere")
    (cache / SHARD_FILES[0]).symlink_to(tmp_path / "elsewhere")
    use(tmp_path / "link", verify=True)


def test_a_file_or_a_circle_of_links_in_place_of_the_cache_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("file", "loop", "missing"):
        with pytest.raises(CraftError, match=name):
            AnchorStore.open(tmp_path / name)


def test_random_damage_to_an_unverified_cache_never_crashes(cache, capfd):
    chosen = random.Random(0)  # noqa: S311
    originals = {name: (cache / name).read_bytes() for name in SHARD_FILES}
    for _ in range(150):
        name = chosen.choice(SHARD_FILES)
        data = bytearray(originals[name])
        for _ in range(chosen.randint(1, 6)):
            # Half of the damage goes into the header, where it can mislead most.
            end = chosen.choice((8 + int.from_bytes(originals[name][:8], "little"), len(data)))
            data[chosen.randrange(end)] = chosen.randrange(256)
        put(cache / name, data)
        try:
            use(cache, verify=False)
        except CraftError:
            continue
        finally:
            put(cache / name, originals[name])
    capfd.readouterr()


def test_a_build_goes_on_with_whole_shards_only(tmp_path):
    (tmp_path / BUILD_FILE).write_text("{}")
    write_shard(tmp_path, 0, make_columns(4))
    record = write_shard(tmp_path, 1, make_columns(4))
    path = tmp_path / SHARD_FILES[0]
    for target in (path, checksum_path(path)):
        data = target.read_bytes()
        for place in range(0, len(data), max(1, len(data) // 25)):
            flipped = bytearray(data)
            flipped[place] ^= 1
            put(target, flipped)
            assert finished_shards(tmp_path) == {1: record}
        put(target, data)
    assert set(finished_shards(tmp_path)) == {0, 1}


def test_all_rows_are_there_without_faults(intact):
    assert len(AnchorStore.open(intact)) == NUM_ANCHORS
