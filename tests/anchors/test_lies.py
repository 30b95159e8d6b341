"""Caches whose sizes and digests are all right and whose content is not: what checksums cannot find."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lerobot_craft.anchors.manifest import shard_name
from lerobot_craft.io.files import write_checksum
from tests.anchors.small_cache import assert_refused, build_cache, put, use


@pytest.fixture
def cache(tmp_path):
    build_cache(tmp_path / "cache")
    return tmp_path / "cache"


def edit_manifest(directory, edit):
    """Changes the manifest and makes its checksum right again."""
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    edit(content)
    put(path, json.dumps(content).encode())
    write_checksum(path)


def swap_names(content):
    first, second, _ = content["shards"]
    first["file"], second["file"] = second["file"], first["file"]


def shift_rows(content):
    for shard, rows in zip(content["shards"], (5, 5, 0), strict=True):
        shard["rows"] = rows


def one_row_more(content):
    content["shards"][2]["rows"] += 1
    content["num_anchors"] += 1
    content["counts"][0] += 1


def drop_last_shard(content):
    content["num_anchors"] -= content["shards"].pop()["rows"]


LIES = {
    "swapped names": swap_names,
    "shifted rows": shift_rows,
    "one row more": one_row_more,
    "a shard dropped without its counts": drop_last_shard,
    "wrong size": lambda c: c["shards"][0].update(bytes=c["shards"][0]["bytes"] + 1),
    "wrong digest": lambda c: c["shards"][0].update(sha256="0" * 64),
    "wrong dtype": lambda c: c["columns"]["hidden"].update(dtype="float16"),
    "wrong shape": lambda c: c["columns"]["hidden"].update(shape=[3, 2]),
    "ragged for dense": lambda c: c["columns"]["hidden"].update(ragged=True),
    "dense for ragged": lambda c: c["columns"]["tokens"].update(ragged=False),
    "a column that is not there": lambda c: c["columns"].update(more=c["columns"]["hidden"]),
    "a column that is not declared": lambda c: c["columns"].pop("mask"),
    "a path": lambda c: c["shards"][0].update(file=f"../cache/{shard_name(0)}"),
    "no shards": lambda c: c.update(shards=[]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_with_a_right_checksum_is_refused(cache, lie):
    edit_manifest(cache, LIES[lie])
    assert_refused(cache)


def rewrite_shard(directory, edit, number=0):
    """Changes the tensors of a shard and makes every size and digest right again."""
    path = directory / shard_name(number)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    path.unlink()
    save_file(tensors, path)
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    edit_manifest(directory, lambda c: c["shards"][number].update(bytes=len(data), sha256=digest))


SHARD_LIES = {
    "negative offset": lambda t: t["tokens.offsets"][1].fill_(-1),
    "huge offset": lambda t: t["tokens.offsets"][1].fill_(2**62),
    "late begin": lambda t: t["tokens.offsets"][0].fill_(1),
    "early end": lambda t: t["tokens.offsets"][-1].sub_(1),
    "offsets of floats": lambda t: t.update({"tokens.offsets": t["tokens.offsets"].double()}),
    "too few offsets": lambda t: t.update({"tokens.offsets": t["tokens.offsets"][[0, -1]]}),
    "no offsets": lambda t: t.pop("tokens.offsets"),
    "offsets alone": lambda t: t.pop("tokens"),
    "offsets of a dense column": lambda t: t.update({"mask.offsets": torch.arange(5)}),
    "another dtype": lambda t: t.update(hidden=t["hidden"].half()),
    "a row less": lambda t: t.update(hidden=t["hidden"][:-1]),
    "a wider row": lambda t: t.update(hidden=t["hidden"].repeat(1, 2, 1)),
    "a scalar": lambda t: t.update(hidden=torch.zeros(())),
}


@pytest.mark.parametrize("lie", SHARD_LIES)
def test_a_shard_that_lies_with_right_checksums_is_refused(cache, lie):
    rewrite_shard(cache, SHARD_LIES[lie])
    assert_refused(cache)


def test_an_honest_rewrite_is_accepted(cache):
    rewrite_shard(cache, lambda tensors: tensors["hidden"].zero_())
    use(cache, verify=True)
