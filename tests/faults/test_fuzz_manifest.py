"""A manifest that anybody could have written, its checksum right: the reader says what is wrong, and never crashes."""

import copy
import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lerobot_craft.anchors.loader import open_cache, retained_of
from lerobot_craft.anchors.manifest import Manifest
from lerobot_craft.anchors.verify import reproduce
from lerobot_craft.errors import CraftError
from lerobot_craft.io.files import write_checksum
from lerobot_craft.io.strict_json import StrictJSONError
from lerobot_craft.policies import adapter_for
from lerobot_craft.training.anchor_batches import layer_scales_of, units_of
from tests.anchors.small_cache import put

SHORT, LONG = 60, 1000

leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
anything = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
)
near = st.sampled_from([0, 1, -1, 2**63, -(2**63), 1e308, "", "../x", "/etc/passwd", "float32", "save", [], {}, None])


@given(st.binary(max_size=200) | anything.map(lambda content: json.dumps(content).encode()))
def test_any_bytes_are_read_or_refused(data):
    try:
        Manifest.from_bytes(data)
    except StrictJSONError:
        return


def places(content, path=()):
    """Every key and index of a JSON value."""
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in keys:
        yield (*path, key)
        yield from places(content[key], (*path, key))


def mutate(content, data):
    """One change: another value, a field gone, a field more."""
    *way, last = data.draw(st.sampled_from(sorted(places(content), key=str)))
    inner = content
    for key in way:
        inner = inner[key]
    change = data.draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"]))
    if change == "remove":
        del inner[last]
    elif change == "add" and isinstance(inner, dict):
        inner[data.draw(st.text(max_size=8))] = data.draw(anything)
    else:
        inner[last] = data.draw(near | anything)


@pytest.fixture(scope="module")
def real_cache(anchor_data, teachers, tmp_path_factory):
    """A cache as `craft cache build` makes it, its teacher, and what its manifest says."""
    from lerobot_craft.anchors.build import Ranks, build_cache, prepare
    from lerobot_craft.anchors.recipe import DatasetFlags, DocumentsBuild

    directory = tmp_path_factory.mktemp("fuzz") / "cache"
    data = DatasetFlags("local/old", str(anchor_data / "old"))
    config = DocumentsBuild(
        old_dataset=data, num_anchors=6, shard_size=4, output_dir=directory, retention_mode="action"
    )
    build_cache(prepare(config, teachers("act")), directory, ranks=Ranks())
    return directory, teachers("act"), json.loads((directory / "manifest.json").read_bytes())


def use(directory, teacher):
    """As training does, up to its first step: a batch, the units of the budget, the teacher's values computed again."""
    loader = open_cache(directory, teacher=teacher.fingerprint, policy_config=teacher.config)
    retained = retained_of(loader.manifest, adapter_for(teacher.config), teacher.policy)
    loader.batch(step=0, batch_size=4, seed=0)
    loss_type = retained.loss_types(adapter_for(teacher.config))[0]
    units_of(loader.manifest.scales, loader.manifest.instructions, loss_type)
    layer_scales_of(loader.manifest.values.get("layer_scales"), loss_type)
    reproduce(loader, teacher, num_anchors=2)


def fuzz(real_cache, examples):
    directory, teacher, content = real_cache
    counts = {"refused": 0, "read": 0}

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def mutated(data):
        changed = copy.deepcopy(content)
        for _ in range(data.draw(st.sampled_from([1, 1, 1, 2, 4]))):
            mutate(changed, data)
        put(directory / "manifest.json", json.dumps(changed).encode())
        write_checksum(directory / "manifest.json")
        try:
            use(directory, teacher)
            counts["read"] += 1
        except CraftError:
            counts["refused"] += 1

    mutated()
    assert counts["refused"] > examples // 4
    return counts


def test_mutated_manifests_are_read_or_refused(real_cache):
    fuzz(real_cache, SHORT)


@pytest.mark.slow  # a minute
@pytest.mark.timeout(600)
def test_many_mutated_manifests_are_read_or_refused(real_cache, tally):
    for outcome, times in fuzz(real_cache, LONG).items():
        tally.add("forged manifests with right checksums", outcome, times)


@pytest.mark.parametrize("shape", [[32, 32], [2, 32, 32], [3, 0, 32], [1, 1, 3, 32, 32], []])
def test_a_picture_of_no_shape_is_refused(real_cache, tmp_path, shape):
    directory, teacher, content = real_cache
    copied = shutil.copytree(directory, tmp_path / "cache")
    changed = copy.deepcopy(content)
    changed["input_features"]["observation.images.top"]["shape"] = shape
    put(copied / "manifest.json", json.dumps(changed).encode())
    write_checksum(copied / "manifest.json")
    with pytest.raises(CraftError):
        use(copied, teacher)


def test_the_cache_itself_is_fine(real_cache, tmp_path):
    directory, teacher, content = real_cache
    copied = shutil.copytree(directory, tmp_path / "cache")
    put(copied / "manifest.json", json.dumps(content).encode())
    write_checksum(copied / "manifest.json")
    use(copied, teacher)
