import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lerobot_craft.anchors.columns import concatenate, take
from lerobot_craft.anchors.images import decode_images
from lerobot_craft.anchors.store import AnchorStore
from tests.anchors.small_cache import NUM_ANCHORS, assert_same_columns, build_cache

RESIDENT = {"all in memory": 1 << 30, "some in memory": 300, "all mapped": 0}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    directory = tmp_path_factory.mktemp("cache")
    return directory, concatenate(build_cache(directory))


@pytest.fixture(scope="module", params=RESIDENT.values(), ids=RESIDENT.keys())
def store(cache, request):
    return AnchorStore.open(cache[0], resident_bytes=request.param)


@given(picks=st.lists(st.integers(0, NUM_ANCHORS - 1), max_size=25))
def test_rows_come_in_the_order_asked(cache, store, picks):
    rows = torch.tensor(picks, dtype=torch.int64)
    assert_same_columns(store.take(rows), take(cache[1], rows))


def test_the_budget_decides_what_stays_in_the_files(cache):
    kept = [len(AnchorStore.open(cache[0], resident_bytes=budget)._resident) for budget in RESIDENT.values()]
    assert kept[0] == 6
    assert 0 < kept[1] < 6
    assert kept[2] == 0


def test_taken_rows_are_copies(cache, store):
    rows = torch.arange(NUM_ANCHORS)
    got = store.take(rows)
    got["hidden"].zero_()
    got["tokens"].values.zero_()
    assert_same_columns(store.take(rows), cache[1])


def test_rows_outside_are_refused(store):
    for index in (-1, NUM_ANCHORS):
        with pytest.raises(IndexError, match="from 0 to 9"):
            store.take(torch.tensor([0, index]))


def test_the_store_knows_its_size(cache, store):
    assert len(store) == NUM_ANCHORS
    assert store.manifest.num_anchors == NUM_ANCHORS
    sizes = store.bytes_by_column()
    assert sizes["hidden"] == NUM_ANCHORS * 2 * 3 * 2
    on_disk = sum(shard.bytes for shard in store.manifest.shards)
    assert 0.2 * on_disk < sum(sizes.values()) < on_disk  # the rest is the files' headers


def test_images_are_whole(store):
    images = decode_images(store.take(torch.tensor([7, 2]))["observation.images.top"], [2, 3, 5, 6])
    assert images.shape == (2, 2, 3, 5, 6)


def test_verifying_reads_every_byte_once(cache):
    told = []
    store = AnchorStore.open(str(cache[0]), progress=told.append)
    assert sum(told) == sum(shard.bytes for shard in store.manifest.shards)
    told.clear()
    AnchorStore.open(cache[0], verify=False, progress=told.append)
    assert told == []


def test_a_cache_of_one_shard(tmp_path):
    (columns,) = build_cache(tmp_path, num_anchors=3)
    rows = torch.tensor([2, 0])
    assert_same_columns(AnchorStore.open(tmp_path, resident_bytes=0).take(rows), take(columns, rows))
