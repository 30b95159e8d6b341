import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lerobot_craft.anchors.columns import Ragged, take
from lerobot_craft.anchors.manifest import ShardReader, finished_shards, shard_name, write_shard
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import checksum_path
from tests.anchors.small_cache import assert_same_columns, make_columns


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_shard_comes_back_as_it_was(tmp_path):
    columns = make_columns(6)
    record = write_shard(tmp_path, 3, columns)
    data = (tmp_path / "shard-00003.safetensors").read_bytes()
    assert (record.file, record.rows, record.bytes) == ("shard-00003.safetensors", 6, len(data))
    assert record.sha256 == hashlib.sha256(data).hexdigest()
    reader = ShardReader(tmp_path / record.file)
    assert reader.rows == 6
    rows = torch.tensor([5, 0, 0, 3])
    assert_same_columns(reader.take(rows), take(columns, rows))
    assert_same_columns(reader.take(rows[:0]), take(columns, rows[:0]))


def test_equal_columns_give_equal_bytes(tmp_path):
    columns = make_columns(3)
    first = write_shard(tmp_path, 0, columns)
    second = write_shard(tmp_path, 1, dict(reversed(columns.items())))
    assert first.sha256 == second.sha256


def test_columns_may_be_views_of_the_same_tensor(tmp_path):
    base = torch.arange(24).reshape(4, 6)
    write_shard(tmp_path, 0, {"a": base[:, :2], "b": base, "c": base[:, ::2], "d": base})
    got = ShardReader(tmp_path / shard_name(0)).take(torch.arange(4))
    assert_same_columns(got, {"a": base[:, :2], "b": base, "c": base[:, ::2], "d": base})


def test_a_shard_of_a_gigabyte_is_opened_and_read_without_loading_it(tmp_path):
    rows, width = 1 << 14, 1 << 16
    header = json.dumps({"x": {"dtype": "U8", "shape": [rows, width], "data_offsets": [0, rows * width]}}).encode()
    path = tmp_path / shard_name(0)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + rows * width)  # a hole: takes no disk
    before = resident_bytes()
    got = ShardReader(path).take(torch.tensor([rows - 1, 5]))["x"]
    assert got.shape == (2, width)
    assert resident_bytes() - before < 64 * 2**20


def test_what_a_cache_cannot_hold_is_refused(tmp_path):
    for columns, words in [
        ({}, "number of rows"),
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "number of rows"),
        ({"a": torch.zeros(0, 3)}, "at least one row"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({"a.offsets": torch.zeros(2)}, "offsets"),
        ({"": torch.zeros(2)}, "name"),
    ]:
        with pytest.raises(ValueError, match=words):
            write_shard(tmp_path, 0, columns)
    assert not list(tmp_path.iterdir())


INT = torch.int64


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.zeros(2), "b": torch.zeros(3)}, "number of rows"),
        ({"a": torch.zeros(())}, "shape"),
        ({"a": torch.zeros(0, 2)}, "no rows"),
        ({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, "float8"),
        ({"a.offsets": torch.zeros(2, dtype=INT)}, "has no values"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([0, 3], dtype=torch.int32)}, "int64"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([[0, 3]])}, "int64"),
        ({"a": torch.zeros(3), "a.offsets": torch.zeros(0, dtype=INT)}, "int64"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([0, 2])}, "rise"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([0, 4])}, "rise"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([1, 3])}, "rise"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([0, 4, 3])}, "rise"),
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([0, -1, 3])}, "rise"),
        # All differences of these are positive, because they overflow.
        ({"a": torch.zeros(3), "a.offsets": torch.tensor([0, 2**63 - 1, -2, 3])}, "rise"),
    ],
)
def test_a_lying_file_is_refused(tmp_path, tensors, words):
    path = tmp_path / "shard.safetensors"
    save_file(tensors, path)
    with pytest.raises(CraftError, match=words):
        ShardReader(path)


def test_what_is_no_safetensors_file_is_refused(tmp_path):
    for content in (b"", b"{}", bytes(8), b"\xff" * 100, (1 << 40).to_bytes(8, "little") + b"{}"):
        (tmp_path / "shard").write_bytes(content)
        with pytest.raises(CraftError, match="not a shard"):
            ShardReader(tmp_path / "shard")
    with pytest.raises(CraftError, match="no such file"):
        ShardReader(tmp_path / "missing")


def test_only_whole_shards_count_as_finished(tmp_path):
    records = [write_shard(tmp_path, index, make_columns(4, seed=index)) for index in range(8)]
    paths = [tmp_path / record.file for record in records]
    checksum_path(paths[1]).unlink()  # killed between the shard and its checksum
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    paths[3].unlink()
    checksum_path(paths[4]).write_text("nonsense")
    paths[5].write_bytes(paths[6].read_bytes())
    paths[7].unlink()
    paths[7].mkdir()
    (tmp_path / "shard-1.safetensors").write_bytes(b"")
    (tmp_path / ".shard-00009.safetensors.tmp").write_bytes(b"half")
    assert finished_shards(tmp_path) == {0: records[0], 6: records[6]}


def test_a_checksummed_file_that_is_no_shard_is_not_finished(tmp_path):
    path = tmp_path / shard_name(0)
    path.write_bytes(b"{}")
    checksum_path(path).write_text(f"{hashlib.sha256(b'{}').hexdigest()}  {path.name}\n")
    assert finished_shards(tmp_path) == {}


def test_ragged_rows_of_length_zero(tmp_path):
    column = Ragged(torch.empty(0, 3), torch.zeros(2, dtype=torch.int64))
    write_shard(tmp_path, 0, {"a": column})
    assert_same_columns(ShardReader(tmp_path / shard_name(0)).take(torch.tensor([1, 0])), {"a": column})
