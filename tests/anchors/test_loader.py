"""What training gets from a cache, and the caches that it refuses."""

import hashlib
import json

import pytest
import torch

from lerobot_craft.anchors.loader import AnchorLoader, open_cache
from lerobot_craft.anchors.verify import verify_cache
from lerobot_craft.errors import CraftError


@pytest.fixture
def cache(build):
    return build("smolvla", retention_mode="action")


def rows(batch):
    return batch.columns["frame"].tolist()


def test_the_order_depends_on_the_seed_and_the_step_only(cache):
    loader, again = open_cache(cache), open_cache(cache)
    steps = [rows(loader.batch(step, 4, seed=3)) for step in range(12)]
    assert [rows(again.batch(step, 4, seed=3)) for step in range(5, 12)] == steps[5:]  # a resumed run
    assert [rows(again.batch(step, 4, seed=4)) for step in range(12)] != steps


def test_ranks_share_a_step(cache):
    loader = open_cache(cache)
    together = rows(loader.batch(5, 6, seed=0))
    shared = [rows(loader.batch(5, 3, seed=0, rank=rank, world_size=2)) for rank in range(2)]
    assert shared == [together[0::2], together[1::2]]


def test_draws_take_turns(build):
    loader = open_cache(build("pi0", retention_mode="action", num_draws=2))
    draws = [loader.batch(step, 9, seed=0).draw.tolist() for step in range(6)]
    assert draws == [[n] * 9 for n in (0, 0, 1, 1, 2, 2)]  # passes over 18 anchors; the values repeat after two


def test_few_old_frames_fill_half_of_every_batch_and_meet_fresh_noise(build):
    loader = open_cache(build("pi0", retention_mode="action", anchor_source="both", old_frames=3, num_draws=4))
    for step in range(6):
        batch = loader.batch(step, 8, seed=0)
        cross = batch.columns["cross"].bool()
        assert cross.tolist() == [False] * 4 + [True] * 4
        frames = list(zip(batch.columns["frame"][:4].tolist(), batch.draw[:4].tolist(), strict=True))
        assert len(set(frames)) == 4  # three frames in four places: the one that comes twice does so in another pass


def test_images_that_do_not_fit_into_memory_are_decoded_each_time(cache):
    kept = open_cache(cache)
    decoded = AnchorLoader(kept.store, decoded_bytes=0)
    for step in range(3):
        one, two = kept.batch(step, 5, seed=0), decoded.batch(step, 5, seed=0)
        assert torch.equal(one.raw["observation.images.top"], two.raw["observation.images.top"])


def test_the_wrong_kind_is_refused_with_the_command_that_mends_it(cache):
    with pytest.raises(CraftError, match=r"holds action anchors and training retains hidden.*--retention_mode=hidden"):
        open_cache(cache, retention_mode="hidden")


@pytest.mark.parametrize(
    ("part", "sentence"),
    [("weights", "another teacher"), ("stats", "--craft.normalization=keep"), ("tokenizers", "other tokenizers")],
)
def test_another_teacher_is_refused_by_what_differs(cache, teachers, part, sentence):
    present = dict(teachers("smolvla").fingerprint)
    open_cache(cache, teacher=present)
    with pytest.raises(CraftError, match=f"does not belong to this policy: .*{sentence}"):
        open_cache(cache, teacher=present | {part: "0" * 64})


def test_another_type_of_policy_is_refused(cache, teachers):
    with pytest.raises(CraftError, match="built by smolvla and this policy is act"):
        open_cache(cache, policy_config=teachers("act").config)


def test_changed_weights_are_another_teacher(cache, teachers, checkpoints):
    from lerobot_craft.teacher.fingerprint import fingerprint
    from lerobot_craft.teacher.load import load_teacher

    other = load_teacher(checkpoints("smolvla"))
    with torch.no_grad():
        next(other.policy.parameters()).view(-1)[0] += 1e-3
    changed = fingerprint(other.policy, other.preprocessor, other.postprocessor)
    with pytest.raises(CraftError, match="its weights differ"):
        open_cache(cache, teacher=changed)


def test_a_moved_dataset_is_found_by_its_root_and_another_one_is_refused(build, anchor_data, teachers):
    config = teachers("smolvla").config
    cache = build("smolvla", inputs="reference", retention_mode="action")
    moved = open_cache(cache, policy_config=config, roots={"local/old": str(anchor_data / "old")})
    assert moved.take(torch.arange(2)).raw["observation.images.top"].shape == (2, 1, 3, 64, 64)
    with pytest.raises(CraftError, match="not the one that the cache refers to"):
        open_cache(cache, policy_config=config, roots={"local/old": str(anchor_data / "new")})


def test_verify_computes_anchors_again(cache, teachers):
    """A cache whose checksums hold but whose values are wrong: only the teacher can tell."""
    from safetensors.torch import load_file, save_file

    verify_cache(cache, teachers("smolvla"))
    shard = cache / "shard-00001.safetensors"
    tensors = load_file(shard)
    tensors["target"][3, 0, 0, 0] += 0.5
    save_file(tensors, shard)
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["shards"][1] |= {"sha256": hashlib.sha256(shard.read_bytes()).hexdigest(), "bytes": shard.stat().st_size}
    text = json.dumps(manifest)
    (cache / "manifest.json").write_text(text)
    (cache / "manifest.sha256").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")
    verify_cache(cache)  # the bytes are what the manifest says
    with pytest.raises(CraftError, match="no longer says what"):
        verify_cache(cache, teachers("smolvla"))
