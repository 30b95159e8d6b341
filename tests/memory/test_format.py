import hashlib
import json
import os

import pytest
import torch

from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.manifest import write_shard
from lerobot_craft.cli import main
from lerobot_craft.errors import CraftError
from lerobot_craft.io import files
from lerobot_craft.io.files import write_checksum
from lerobot_craft.memory.format import memory_in, read_memory, write_memory
from tests.anchors.small_cache import build_cache

FOLDER = "craft_memory"


@pytest.fixture
def written(memories, tmp_path):
    """A memory in its folder."""
    write_memory(memories("smolvla"), tmp_path / FOLDER)
    return tmp_path / FOLDER


def same(first, second):
    assert first.columns.keys() == second.columns.keys()
    for name, column in first.columns.items():
        other = second.columns[name]
        if isinstance(column, Ragged):
            assert torch.equal(column.lengths, other.lengths)
            column, other = column.values, other.values
        assert column.dtype == other.dtype
        assert torch.equal(column, other), name
    return (first.policy_type, first.input_features, first.sources, first.instructions, first.seed) == (
        *(second.policy_type, second.input_features, second.sources, second.instructions, second.seed),
    )


def edit_manifest(directory, **changes):
    """Changes the manifest and makes its checksum right again."""
    path = directory / "manifest.json"
    content = json.loads(path.read_bytes())
    content.update(changes)
    path.write_text(json.dumps(content))
    write_checksum(path)


@pytest.mark.parametrize("policy_type", ["smolvla", "diffusion", "act"])
def test_what_is_written_is_read_again(memories, tmp_path, policy_type):
    memory = memories(policy_type)
    write_memory(memory, tmp_path / FOLDER)
    assert same(read_memory(tmp_path / FOLDER), memory)


def test_the_same_memory_gives_the_same_bytes(memories, tmp_path):
    digests = []
    for name in ("a", "b"):
        write_memory(memories("smolvla"), tmp_path / name / FOLDER)
        files = sorted((tmp_path / name / FOLDER).iterdir())
        digests.append([(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files])
    assert digests[0] == digests[1]


def test_no_path_of_this_machine_travels(written, anchor_data):
    content = json.loads((written / "manifest.json").read_bytes())
    assert [record["root"] for record in content["datasets"]] == [None]
    assert str(anchor_data) not in (written / "manifest.json").read_text()
    assert content["kind"] == "memory"
    assert content["values"] == {"sources": [{"kind": "demonstrations", "fps": 10.0}]}


def test_it_is_found_in_a_checkpoint(written):
    assert memory_in(written.parent) == written
    assert memory_in(written) is None


def test_the_commands_for_caches_read_it_too(written, capsys):
    assert main(["cache", "info", str(written)]) == 0
    said = capsys.readouterr().out
    assert "memory of a smolvla" in said
    assert "local/old (demonstrations, 10 frames per second)" in said
    assert main(["cache", "verify", str(written)]) == 0
    assert "all checksums hold" in capsys.readouterr().out


def test_a_cache_is_not_taken_for_a_memory(tmp_path):
    build_cache(tmp_path / "cache")
    with pytest.raises(CraftError, match="not a memory"):
        read_memory(tmp_path / "cache")


def refused(directory, match):
    with pytest.raises(CraftError, match=match) as error:
        read_memory(directory)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_truncated_file_is_refused(written):
    shard = written / "shard-00000.safetensors"
    os.truncate(shard, shard.stat().st_size - 7)
    assert "craft remember" in refused(written, "bytes, but the manifest says")


def test_one_changed_bit_is_refused(written):
    shard = written / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert "craft remember" in refused(written, "it is damaged")


def test_an_edited_manifest_is_refused(written):
    path = written / "manifest.json"
    path.write_text(path.read_text().replace("open the drawer", "open the window"))
    assert "craft remember" in refused(written, "it was damaged or edited")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"teacher": {"weights": "ab" * 32}}, "teacher: a memory has none"),
        ({"values": {}}, "values.sources: missing field"),
        ({"values": {"sources": []}}, "values.sources: 0 for 1 datasets"),
        ({"values": {"sources": [{"kind": "films", "fps": 10.0}]}}, "expected one of demonstrations"),
        ({"values": {"sources": [{"kind": "rollouts", "fps": 0.0}]}}, "must be positive"),
        ({"inputs": "reference"}, "a memory holds frames of datasets itself"),
        ({"instructions": ["a", "b"], "counts": [10, 5]}, "refer to instructions that it does not have"),
        ({"counts": [6, 4, 5]}, "other frames of its instructions"),
    ],
)
def test_a_forged_manifest_is_refused(written, changes, match):
    edit_manifest(written, **changes)
    refused(written, match)


def test_a_forged_place_on_a_machine_is_refused(written):
    (record,) = json.loads((written / "manifest.json").read_bytes())["datasets"]
    edit_manifest(written, datasets=[{**record, "root": "/somewhere"}])
    refused(written, "names no place on a machine")


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("position", 10_000, "outside of its episode"),
        ("dataset", 3, "datasets that it does not name"),
        ("frame", 10_000, "frames that 'local/old' does not have"),
        ("success", 7, "success is none of"),
        ("action", float("nan"), "NaN or infinity"),
        ("input.observation.state", float("inf"), "NaN or infinity"),
    ],
)
def test_forged_columns_are_refused(memories, tmp_path, name, value, match):
    memory = memories("smolvla")
    changed = memory.columns[name].clone()
    changed[1] = value
    forged = {**memory.columns, name: changed}
    write_memory(memory, tmp_path / FOLDER)
    record = write_shard(tmp_path / FOLDER, 0, forged)
    edit_manifest(tmp_path / FOLDER, shards=[vars(record)])
    refused(tmp_path / FOLDER, match)


@pytest.mark.parametrize("swapped", [True, False])
def test_a_kill_while_writing_leaves_the_old_or_the_new_one(memories, written, swapped, monkeypatch):
    if not swapped:
        monkeypatch.setattr(files, "_exchange", lambda first, second: False)
    before, after = memories("smolvla"), memories("smolvla", frames_per_task=2)

    def killed(*_):
        raise KeyboardInterrupt

    for place in ("_sync_tree", "_put_in_place"):
        with monkeypatch.context() as patch:
            patch.setattr(files, place, killed)
            with pytest.raises(KeyboardInterrupt):
                write_memory(after, written)
        assert same(read_memory(written), before)
    write_memory(after, written)
    assert same(read_memory(written), after)
    assert [path.name for path in written.parent.iterdir()] == [FOLDER]
