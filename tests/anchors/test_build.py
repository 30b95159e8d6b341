"""Every policy, every kind of value, every source of anchors: build, verify, load, and the teacher has no drift."""

import hashlib
import shutil

import pytest
import torch

from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.loader import open_cache, retained_of
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.anchors.verify import verify_cache
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import autocast
from lerobot_craft.lerobot_api.processors import policy_batch
from lerobot_craft.lerobot_api.reading import read_batches
from lerobot_craft.policies import adapter_for, mode
from tests.anchor_fixtures import NEW_TASKS, OLD_TASKS, POLICIES

READS_INSTRUCTIONS = ("pi0_fast", "pi0", "pi05", "smolvla")
KINDS = {
    "pooled": {"retention_mode": "hidden", "hidden_layer": "-1"},
    "per_token": {"retention_mode": "hidden", "layers_to_save": "all", "per_token": True},
    "action": {"retention_mode": "action"},
    "pairs": {"retention_mode": "hidden", "layers_to_save": "-2,-1"},
    "draws": {"retention_mode": "action", "num_draws": 3},
    "expert": {"retention_mode": "hidden", "layers_to_save": "-1,expert:all", "per_token": True},
    "token_ce": {"retention_mode": "token_ce"},
}
CASES = [
    *((policy, kind, "dataset") for policy in POLICIES for kind in ("pooled", "per_token", "action")),
    *((policy, "pairs", source) for policy in READS_INSTRUCTIONS for source in ("dataset", "both")),
    *((policy, "action", source) for policy in READS_INSTRUCTIONS for source in ("cross", "both")),
    *((policy, "draws", "dataset") for policy in ("pi0", "diffusion")),
    *((policy, "expert", "cross") for policy in ("pi0", "pi05", "smolvla")),
    *(("pi0_fast", "token_ce", source) for source in ("dataset", "cross", "both")),
]


def drift_of(teacher, directory, step=0, batch_size=7):
    """Drift of the teacher itself on one batch of its cache, and the batch."""
    loader = open_cache(directory, teacher=teacher.fingerprint)
    adapter = adapter_for(teacher.config)
    anchors = loader.batch(step, batch_size, seed=0)
    cameras = [key for key in anchors.raw if "images" in key]
    batch = policy_batch(anchors.raw, cameras, teacher.preprocessor)
    retained = retained_of(loader.manifest, adapter, teacher.policy)
    with torch.no_grad(), mode(teacher.policy, train=adapter.train_mode), autocast(teacher.config):
        drift = student_drift(adapter, teacher.policy, batch, anchors.columns, retained, draw=anchors.draw)
    return drift, anchors


@pytest.mark.parametrize(("policy", "kind", "source"), CASES)
def test_the_teacher_has_no_drift_from_its_own_cache(policy, kind, source, build, teachers):
    extra = {"drawn_states": 0.5, "state_jitter": 0.1} if source != "dataset" else {}
    directory = build(policy, anchor_source=source, **KINDS[kind], **extra)
    manifest, reproduction = verify_cache(directory, teachers(policy))
    assert reproduction.holds, reproduction
    assert reproduction.anchors == manifest.num_anchors == 18
    assert manifest.instructions == OLD_TASKS
    assert manifest.counts == [6, 6, 6]
    drift, anchors = drift_of(teachers(policy), directory)
    if kind == "token_ce":
        assert torch.allclose(drift, anchors.columns["teacher_ce"], rtol=1e-4)
    else:
        assert float(drift.max()) < 1e-9
    assert all(value > 0 for scale in manifest.scales for value in scale.values.values())


@pytest.mark.parametrize(
    ("policy", "setting"), [*((p, "--dtype=bfloat16") for p in ("pi0_fast", "pi0")), ("smolvla", "--use_amp=true")]
)
@pytest.mark.parametrize("kind", ["per_token", "action"])
def test_bfloat16_is_reproduced_under_bfloat16_and_refused_under_float32(policy, setting, kind, build, teachers):
    directory = build(policy, policy=(setting,), **KINDS[kind])
    manifest, reproduction = verify_cache(directory, teachers(policy, setting))
    assert manifest.autocast == "bfloat16"
    assert reproduction.holds
    with pytest.raises(CraftError, match="built under bfloat16 autocast and this policy runs under none"):
        verify_cache(directory, teachers(policy))


@pytest.mark.parametrize("policy", READS_INSTRUCTIONS)
def test_another_instruction_gives_other_values(policy, build, teachers):
    directory = build(policy, retention_mode="action", anchor_source="cross")
    teacher = teachers(policy)
    loader = open_cache(directory)
    anchors = loader.batch(0, 6, seed=0)
    adapter = adapter_for(teacher.config)
    swapped = dict(anchors.raw, task=[NEW_TASKS[0]] * 6)
    batch = policy_batch(swapped, [key for key in swapped if "images" in key], teacher.preprocessor)
    with torch.no_grad(), mode(teacher.policy, train=adapter.train_mode):
        drift = student_drift(
            adapter, teacher.policy, batch, anchors.columns, retained_of(loader.manifest, adapter, teacher.policy)
        )
    assert float(drift.min()) > 1e-7


def contents(directory):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def test_the_same_flags_give_the_same_bytes(build):
    first, second = (build("smolvla", name, retention_mode="action", anchor_source="both") for name in "ab")
    assert contents(first) == contents(second)
    assert contents(build("smolvla", "c", retention_mode="action", anchor_source="both", seed=1)) != contents(first)


def test_layer_scales_make_drift_relative(build, teachers, checkpoints):
    from lerobot_craft.anchors.teacher import load_teacher

    directory = build("smolvla", layers_to_save="all", per_token=True)
    student = load_teacher(checkpoints("smolvla"))
    loader, adapter = open_cache(directory), adapter_for(student.config)
    with torch.no_grad():
        for parameter in student.policy.parameters():
            parameter.mul_(1.01)
        anchors = loader.take(torch.arange(6))
        batch = policy_batch(anchors.raw, ["observation.images.top"], student.preprocessor)
        retained = retained_of(loader.manifest, adapter, student.policy)
        scales = {layer: spread["mse"] for layer, spread in loader.manifest.values["layer_scales"].items()}
        absolute, relative, doubled = (
            student_drift(adapter, student.policy, batch, anchors.columns, retained, "mse", layer_scales=s)
            for s in (None, scales, {layer: 2 * scale for layer, scale in scales.items()})
        )
    assert len(scales) == 4
    assert float(absolute.min()) > 0
    assert torch.allclose(relative, 2 * doubled)
    assert not torch.allclose(relative, absolute)


def test_top_k_is_how_many_logits_are_kept(build):
    columns = open_cache(build("pi0_fast", retention_mode="action", top_k=5)).manifest.columns
    assert (columns["kept"].shape, columns["target"].shape) == ([5], [6])


@pytest.mark.parametrize(("policy", "loss"), [("pi0_fast", "token_ce"), ("act", "l1")])
def test_the_unit_is_the_teachers_own_loss_on_the_demonstration(
    policy, loss, build, teachers, opened_once, anchor_data
):
    teacher = teachers(policy)
    loader = open_cache(build(policy, retention_mode="token_ce" if policy == "pi0_fast" else "action"))
    anchors = loader.take(torch.arange(4))
    dataset = opened_once("local/old", anchor_data / "old", policy_config=teacher.config)
    for row, frame in enumerate(anchors.columns["frame"].tolist()):
        (raw,) = read_batches([dataset], [(0, [frame])])
        batch = policy_batch(raw, dataset.meta.camera_keys, teacher.preprocessor)
        with torch.no_grad(), mode(teacher.policy, train=False):
            expected = (
                teacher.policy.forward(batch)[0]
                if policy == "pi0_fast"
                else teacher.policy.forward(batch)[1]["l1_loss"]
            )
        assert float(anchors.columns[f"own_error.{loss}"][row]) == pytest.approx(float(expected), rel=1e-4)


def test_every_anchor_has_its_own_noise_whatever_the_batch(build):
    times = [
        open_cache(build("pi0", f"by{size}", retention_mode="action", batch_size=size)).take(torch.arange(18)).columns
        for size in (4, 7)
    ]
    assert torch.equal(times[0]["fixed.time"], times[1]["fixed.time"])
    assert torch.equal(times[0]["fixed.x_t"], times[1]["fixed.x_t"])
    assert len(times[0]["fixed.time"].unique()) == 18


def test_a_camera_that_the_policy_cannot_do_without_is_missed(build, tmp_path):
    from lerobot_craft.tiny.make import make_local_dataset

    other = make_local_dataset(tmp_path / "side", OLD_TASKS, 1, cameras=("observation.images.side",), image_size=64)
    with pytest.raises(CraftError, match=r"has no observation.images.top.*it has observation.images.side"):
        build("smolvla", old_dataset=DatasetFlags("local/side", str(other)))


def test_pooled_features_have_the_documented_shapes(build):
    manifest = open_cache(build("pi0_fast", **KINDS["pooled"])).manifest
    assert manifest.columns["target_features"].shape == [64]
    manifest = open_cache(build("pi0_fast", "pairs", **KINDS["pairs"])).manifest
    assert manifest.columns["teacher_hidden"].shape == [2, 2, 64]
    assert manifest.values["layers_to_save"] == ["2", "3"]
    assert manifest.values["pooling_strategy"] == {"vision": "mean", "text": "last"}


@pytest.mark.parametrize(("policy", "column"), [("pi0", "fixed.x_t"), ("diffusion", "fixed.noisy_actions")])
def test_noisy_actions_are_kept_at_half_the_size(policy, column, build):
    manifest = open_cache(build(policy, retention_mode="action", num_draws=2)).manifest
    assert (manifest.columns[column].dtype, manifest.columns[column].shape) == ("float16", [2, 8, 4])


@pytest.mark.parametrize("policy", ["act", "pi0_fast"])
def test_what_draws_nothing_is_asked_and_kept_once(policy, build, teachers, monkeypatch):
    asked = []
    adapter = type(adapter_for(teachers(policy).config))
    output = adapter.output

    def counted(*arguments):
        asked.append(arguments)
        return output(*arguments)

    monkeypatch.setattr(adapter, "output", counted)
    once = build(policy, "once", retention_mode="action", num_draws=1)
    times = len(asked)
    often = build(policy, "often", retention_mode="action", num_draws=8)
    assert len(asked) == 2 * times
    assert open_cache(often).manifest.values["num_draws"] == 1
    for shard in sorted(once.glob("*.safetensors")):
        assert (often / shard.name).read_bytes() == shard.read_bytes()


def test_images_are_compressed_bytes_and_states_are_raw(build, anchor_data):
    from lerobot_craft.lerobot_api.datasets import open_dataset

    loader = open_cache(build("smolvla"))
    dataset = open_dataset("local/old", anchor_data / "old")
    stored = loader.store.take(torch.tensor([0]))["input.observation.images.top"]
    assert isinstance(stored, Ragged)
    assert stored.values.dtype == torch.uint8
    anchors = loader.take(torch.arange(5))
    for row in range(5):
        frame = dataset[int(anchors.columns["frame"][row])]
        assert torch.equal(anchors.raw["observation.state"][row].squeeze(0), frame["observation.state"])
        image = (frame["observation.images.top"] * 255).round().to(torch.uint8)
        assert torch.equal(anchors.raw["observation.images.top"][row].squeeze(0), image)
        assert anchors.raw["task"][row] == frame["task"]


@pytest.mark.parametrize("policy", ["smolvla", "diffusion"])
def test_references_read_the_same_observations(policy, build, teachers):
    config = teachers(policy).config
    embedded = open_cache(build(policy, retention_mode="action")).take(torch.arange(18))
    reference = build(policy, "reference", retention_mode="action", inputs="reference")
    loader = open_cache(reference, policy_config=config)
    assert not any("image" in name for name in loader.store.bytes_by_column())
    for _ in range(2):  # decoded, then remembered
        read = loader.take(torch.arange(18))
        for name, value in embedded.raw.items():
            assert list(read.raw[name]) == value if name == "task" else torch.equal(read.raw[name], value), name


def test_videos_are_anchors_too(build, teachers, tmp_path):
    from lerobot_craft.tiny.make import make_local_dataset

    film = DatasetFlags(
        "local/film", str(make_local_dataset(tmp_path / "film", OLD_TASKS, 2, image_size=64, video=True))
    )
    teacher = teachers("smolvla")
    for inputs in ("embedded", "reference"):
        directory = build("smolvla", inputs, old_dataset=film, retention_mode="action", inputs=inputs)
        assert verify_cache(directory, teacher)[1].holds


def test_cross_anchors_hold_new_frames_and_old_instructions(build, anchor_data):
    from lerobot_craft.lerobot_api.datasets import open_dataset

    loader = open_cache(build("smolvla", anchor_source="cross", retention_mode="action", drawn_states=0.5))
    assert [record.repo_id for record in loader.manifest.datasets] == ["local/new"]
    dataset = open_dataset("local/new", anchor_data / "new")
    anchors = loader.take(torch.arange(18))
    assert set(anchors.raw["task"]) == set(OLD_TASKS)
    same_state = 0
    for row in range(18):
        frame = dataset[int(anchors.columns["frame"][row])]
        image = (frame["observation.images.top"] * 255).round().to(torch.uint8)
        assert torch.equal(anchors.raw["observation.images.top"][row].squeeze(0), image)
        same_state += torch.equal(anchors.raw["observation.state"][row].squeeze(0), frame["observation.state"])
    assert same_state == 9


def test_no_old_frame_is_needed_for_cross(build):

    directory = build(
        "pi0",
        anchor_source="cross",
        retention_mode="action",
        old_dataset=DatasetFlags(),
        old_instructions="press it; open",
    )
    assert open_cache(directory).manifest.instructions == ["press it", "open"]


def test_old_instructions_come_from_metadata_alone(build, anchor_data, tmp_path):

    shutil.copytree(anchor_data / "old" / "meta", tmp_path / "old" / "meta")  # no frame of the old tasks
    old = DatasetFlags("local/old", str(tmp_path / "old"))
    directory = build("pi0", anchor_source="cross", retention_mode="action", old_dataset=old)
    assert open_cache(directory).manifest.instructions == OLD_TASKS


def test_several_datasets_are_one_set_of_skills(build, anchor_data, teachers):

    both = DatasetFlags("local/old, local/new", f"{anchor_data / 'old'},{anchor_data / 'new'}")
    directory = build("smolvla", old_dataset=both, num_anchors=20, retention_mode="action")
    manifest, reproduction = verify_cache(directory, teachers("smolvla"))
    assert reproduction.holds
    assert manifest.instructions == [*OLD_TASKS, *NEW_TASKS]
    assert manifest.counts == [5, 5, 5, 5]
    assert [len(record.frames) for record in manifest.datasets] == [15, 5]
    with pytest.raises(CraftError, match=r"names 2 datasets and old_dataset.root 1 directories"):
        build("smolvla", "c", old_dataset=DatasetFlags("a,b", "/x"))


@pytest.mark.parametrize("policy", ["act", "diffusion"])
def test_a_policy_without_instructions_has_no_cross_anchors(policy, build):
    with pytest.raises(CraftError, match=r"reads no instruction.*anchor_source=dataset"):
        build(policy, anchor_source="cross", retention_mode="action")


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "pi0_fast"])
def test_token_ce_needs_a_policy_that_writes_tokens(policy, build):
    with pytest.raises(CraftError, match="retention_mode=action"):
        build(policy, retention_mode="token_ce")


@pytest.mark.parametrize("policy", ["smolvla", "pi0_fast"])
def test_walked_anchors_are_where_the_teacher_goes(policy, build, teachers):
    """The hand moves, by the teacher's actions; what is seen stays the beginning of an episode."""
    options = {"anchor_source": "cross", "retention_mode": "action", "walked_states": 0.7, "num_anchors": 30}
    directory = build(policy, **options)
    assert verify_cache(directory, teachers(policy))[1].holds
    anchors = open_cache(directory).take(torch.arange(30))
    frames = anchors.columns["frame"].tolist()
    of_frame = {frame: [row for row in range(30) if frames[row] == frame] for frame in frames}
    walks = [rows for rows in of_frame.values() if len(rows) > 3]
    assert walks
    for rows in walks:
        states = anchors.raw["observation.state"][rows].flatten(start_dim=1)
        assert len(states.unique(dim=0)) > len(rows) // 2
    if policy == "pi0_fast":  # greedy; the noise of the others is drawn for a batch, and the recipe names its size
        other = open_cache(build(policy, "again", batch_size=4, **options)).take(torch.arange(30))
        assert torch.allclose(other.raw["observation.state"], anchors.raw["observation.state"], atol=1e-4)


def test_a_teacher_without_statistics_of_the_state_cannot_walk(build, monkeypatch):
    monkeypatch.setattr("lerobot_craft.anchors.walks.normalizer_stats", lambda preprocessor: {})
    with pytest.raises(CraftError, match=r"the teacher has no statistics of observation\.state.*walked_states=0"):
        build("smolvla", anchor_source="cross", retention_mode="action", walked_states=0.5, num_anchors=30)


def test_fewer_anchors_than_asked_for_are_told_from_frames(build, caplog):
    build("smolvla", anchor_source="cross", old_instructions="a; b", num_anchors=100, walked_states=0.0)
    assert "72 anchors instead of 100: 72 made from 36 frames, by 2 old instructions. " in caplog.text
    build("smolvla", "both", anchor_source="both", num_anchors=240, old_frames=220, walked_states=0.0)
    assert "anchors instead of 240: 108 old frames and 20 made from " in caplog.text
