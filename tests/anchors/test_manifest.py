import hashlib
import json
import shutil
import subprocess
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lerobot_craft.anchors.columns import ColumnSpec
from lerobot_craft.anchors.manifest import (
    BUILD_FILE,
    DatasetRecord,
    InputFeature,
    Manifest,
    Scale,
    ShardRecord,
    write_shard,
)
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import write_atomically, write_checksum
from lerobot_craft.io.strict_json import StrictJSONError
from tests.anchors.small_cache import build_cache, make_columns, make_manifest

SHARDS = [ShardRecord(f"shard-0000{i}.safetensors", 5, 100 + i, f"{i}" * 64) for i in range(2)]
MANIFEST = make_manifest(SHARDS, make_columns(2))
CONTENT = json.loads(MANIFEST.to_bytes())


def write(directory, data):
    write_atomically(directory / "manifest.json", data)
    write_checksum(directory / "manifest.json")


def test_what_is_saved_is_loaded(tmp_path):
    MANIFEST.save(tmp_path)
    assert Manifest.load(tmp_path) == MANIFEST


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        build_cache(tmp_path / name)
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "two"))
    assert one == two


def test_sha256sum_checks_the_manifest(tmp_path):
    MANIFEST.save(tmp_path)
    tool = shutil.which("sha256sum")
    if tool is None:
        pytest.skip("no sha256sum here")
    subprocess.run([tool, "-c", "--strict", "manifest.sha256"], cwd=tmp_path, check=True, capture_output=True)


def test_saving_removes_what_only_the_build_needed(tmp_path):
    record = write_shard(tmp_path, 0, make_columns(5))
    (tmp_path / BUILD_FILE).write_text("{}")
    make_manifest([record], make_columns(5)).save(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"manifest.json", "manifest.sha256", record.file}


def test_text_for_people_stays_readable(tmp_path):
    assert "grünen Korb".encode() in MANIFEST.to_bytes()


def test_a_missing_cache_says_how_to_build_one(tmp_path):
    with pytest.raises(CraftError, match=r"no such directory\. Build a cache with `craft cache build`"):
        Manifest.load(tmp_path / "nowhere")
    with pytest.raises(CraftError, match=r"not a cache of anchors.*craft cache build"):
        Manifest.load(tmp_path)


def test_an_unfinished_build_says_to_go_on(tmp_path):
    write_shard(tmp_path, 0, make_columns(2))
    with pytest.raises(CraftError, match=r"unfinished\. Run the same `craft cache build` command again"):
        Manifest.load(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / BUILD_FILE).write_text("{}")
    with pytest.raises(CraftError, match="unfinished"):
        Manifest.load(tmp_path / "other")


def test_an_edited_manifest_is_refused(tmp_path):
    MANIFEST.save(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"red", b"tan"))
    with pytest.raises(CraftError, match="damaged or edited"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(("schema", "words"), [(2, "git pull && make setup"), (0, "craft cache build")])
def test_another_schema_says_what_to_do(tmp_path, schema, words):
    write(tmp_path, json.dumps({"schema": schema, "fields": "of another release"}).encode())
    with pytest.raises(CraftError, match=words):
        Manifest.load(tmp_path)


@pytest.mark.parametrize("name", sorted(CONTENT))
@pytest.mark.parametrize("change", ["missing", "null", "object"])
def test_every_field_is_checked(tmp_path, name, change):
    content = dict(CONTENT)
    if change == "missing":
        del content[name]
    else:
        content[name] = None if change == "null" else {"unlikely": {"to": ["fit"]}}
    write(tmp_path, json.dumps(content).encode())
    if (name, change) == ("autocast", "null"):
        Manifest.load(tmp_path)
    else:
        with pytest.raises(CraftError, match=f"manifest.json: {name}"):
            Manifest.load(tmp_path)


SCALE = Scale("spread", 1, {})
HIDDEN = MANIFEST.values


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_anchors": 11}, "num_anchors"),
        ({"shards": []}, "num_anchors"),
        ({"shards": [], "num_anchors": 0, "counts": [0, 0]}, "shards"),
        ({"shards": SHARDS[::-1]}, r"shards\[0\].file"),
        ({"shards": [replace(SHARDS[0], file="../shard-00000.safetensors"), SHARDS[1]]}, r"shards\[0\].file"),
        ({"shards": [replace(SHARDS[0], file="/etc/passwd"), SHARDS[1]]}, r"shards\[0\].file"),
        ({"shards": [replace(SHARDS[0], sha256="0" * 63), SHARDS[1]]}, r"shards\[0\].sha256"),
        ({"shards": [replace(SHARDS[0], rows=4), replace(SHARDS[1], rows=6)]}, r"shards\[1\].rows"),
        ({"shards": [replace(SHARDS[0], rows=11), replace(SHARDS[1], rows=-1)]}, r"shards\[1\]"),
        ({"shards": [SHARDS[0], replace(SHARDS[1], bytes=0)]}, r"shards\[1\]"),
        ({"counts": [10]}, "counts"),
        ({"counts": [11, -1]}, "counts"),
        ({"counts": [5, 4]}, "counts"),
        ({"scales": [SCALE]}, "scales"),
        ({"scales": [SCALE, replace(SCALE, n=-1)]}, r"scales\[1\].n"),
        ({"instructions": ["same", "same"]}, "instructions"),
        ({"datasets": [DatasetRecord("a", None, None, "f", 3, [0, 3])]}, r"datasets\[0\].frames"),
        ({"datasets": [DatasetRecord("a", None, None, "f", 3, [-1])]}, r"datasets\[0\].frames"),
        ({"columns": {}}, "columns"),
        ({"columns": {"a": ColumnSpec("complex64", [1], ragged=False)}}, r"columns\.a\.dtype"),
        ({"columns": {"a": ColumnSpec("int64", [-1], ragged=False)}}, r"columns\.a\.shape"),
        ({"input_features": {"a": InputFeature("raw", [-1])}}, r"input_features\.a\.shape"),
        ({"dtype": "nn"}, "dtype"),
        ({"dtype": "int8"}, "dtype"),
        ({"autocast": "float17"}, "autocast"),
        ({"autocast": "bool"}, "autocast"),
        ({"values": HIDDEN | {"layers_to_save": []}}, r"values\.layers_to_save"),
        ({"values": HIDDEN | {"layers_to_save": [1, 3]}}, r"values\.layers_to_save"),
        ({"values": HIDDEN | {"layers_to_save": ["1"]}}, r"values\.layers_to_save"),
        ({"values": HIDDEN | {"pooling": ["mean"]}}, r"values\.pooling"),
        ({"values": HIDDEN | {"layer_scales": None}}, r"values\.layer_scales"),
        ({"values": HIDDEN | {"layer_scales": {"1": 2.0, "3": 2.0}}}, r"values\.layer_scales\.1"),
        ({"values": HIDDEN | {"layer_scales": {"1": {"mse": "2"}, "3": {}}}}, r"values\.layer_scales\.1\.mse"),
        ({"kind": "action"}, r"values\.top_k"),
        ({"kind": "action", "values": {"top_k": 1, "num_draws": 0}}, r"values\.num_draws"),
        ({"kind": "token_ce", "values": {"top_k": 1.0, "num_draws": 1}}, r"values\.top_k"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change, field):
    with pytest.raises(StrictJSONError, match=f"^{field}"):
        replace(MANIFEST, **change).to_bytes()


def test_values_that_json_does_not_keep_are_refused():
    with pytest.raises(ValueError, match="tuple"):
        replace(MANIFEST, values={"layers": (1, 2)}).to_bytes()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(content, prefix=()):
    """Every place in a JSON content."""
    yield prefix
    children = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, child in children:
        yield from paths(child, (*prefix, key))


@given(st.sampled_from(list(paths(CONTENT))[1:]), json_values)
@example(("num_anchors",), 10**400)
def test_any_value_anywhere_is_read_or_refused(path, value):
    content = json.loads(json.dumps(CONTENT))
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    data = json.dumps(content).encode()
    try:
        manifest = Manifest.from_bytes(data)
    except StrictJSONError:
        return
    assert json.loads(manifest.to_bytes()) == json.loads(data)


@given(st.binary(max_size=60), st.integers(0, len(MANIFEST.to_bytes())), st.integers(0, 60))
def test_any_bytes_are_read_or_refused(piece, place, gap):
    data = MANIFEST.to_bytes()
    data = data[:place] + piece + data[place + gap :]
    try:
        manifest = Manifest.from_bytes(data)
    except StrictJSONError:
        return
    assert hashlib.sha256(manifest.to_bytes()).digest()
