"""Where anchors come from: a cache that is there, one that is built now; and what is refused."""

import dataclasses
import functools
import logging
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from filelock import FileLock

from lerobot_craft.anchors.build import Ranks, build_cache
from lerobot_craft.anchors.manifest import MANIFEST_FILE
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.anchors.retained import PER_TOKEN
from lerobot_craft.cli.flags import spelled
from lerobot_craft.cli.train import flag_of
from lerobot_craft.errors import CraftError
from lerobot_craft.training.anchor_source import _job, open_anchors
from tests.anchor_fixtures import OLD_TASKS
from tests.training.anchor_contexts import LORA, OPEN_DATASET, make_context, old_dataset, resume, train_a_little


@pytest.fixture
def context_of(teachers, anchor_data, opened_once, monkeypatch, tmp_path):
    monkeypatch.setattr(OPEN_DATASET, opened_once)
    monkeypatch.setenv("CRAFT_HOME", str(tmp_path / "home"))

    def made(policy_type, **settings):
        return make_context(teachers(policy_type), anchor_data, **settings)

    return made


@pytest.fixture
def from_old(context_of, anchor_data):
    """Contexts whose anchors are frames of the old dataset."""
    return functools.partial(context_of, old_dataset=old_dataset(anchor_data))


def test_a_cache_that_is_there_is_opened(context_of, build):
    directory = build("smolvla", retention_mode="action")
    anchors = open_anchors(context_of("smolvla", retention_mode="action", anchor_cache_dir=directory))
    assert (anchors.directory, anchors.num_anchors, list(anchors.tasks)) == (directory, 18, OLD_TASKS)
    assert anchors.retained.mode == "action"
    batch = anchors.batch(0, 4, rank=0, world_size=1)
    assert batch.raw["task"] == [OLD_TASKS[index] for index in batch.instruction.tolist()]
    assert torch.equal(anchors.instructions.bincount(), torch.tensor([6, 6, 6]))
    assert anchors.units("mse") == [scale.values["mse"] for scale in anchors.manifest.scales]
    assert anchors.layer_scales("mse") is None
    whole, decoded = anchors.costs()
    assert whole.bytes == sum(path.stat().st_size for path in directory.glob("shard-*"))
    assert decoded.bytes == 18 * 3 * 64 * 64


def test_both_ranks_together_are_one_with_all(context_of, build):
    anchors = open_anchors(
        context_of("act", retention_mode="action", anchor_cache_dir=build("act", retention_mode="action"))
    )
    whole = anchors.batch(3, 6, 0, 1).columns["frame"].tolist()
    assert [anchors.batch(3, 3, rank, 2).columns["frame"].tolist() for rank in range(2)] == [whole[::2], whole[1::2]]


def test_a_missing_cache_is_built_and_found_again(from_old, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, "lerobot_craft")
    first = open_anchors(from_old("smolvla", retention_mode="action"))
    assert first.directory.parent == tmp_path / "home" / "anchors"
    assert "building 18 anchors in" in caplog.text
    assert "18/18" in capsys.readouterr().err  # the bar
    caplog.clear()
    second = open_anchors(from_old("smolvla", retention_mode="action"))
    assert second.identity() == first.identity()
    assert "building" not in caplog.text
    assert f"an earlier run are used: {first.directory}" in caplog.text
    other = open_anchors(from_old("smolvla", retention_mode="action", num_anchors=12))
    assert other.directory != first.directory


def test_a_run_waits_for_another_one_that_builds_the_same_anchors(from_old, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lerobot_craft")
    held = FileLock(tmp_path / ".shared.lock")
    held.acquire()
    context = from_old("act", retention_mode="action", anchor_cache_dir=tmp_path / "shared")
    with ThreadPoolExecutor(1) as other:
        opened = other.submit(open_anchors, context)
        while "waiting for it" not in caplog.text and not opened.done():
            time.sleep(0.05)
        assert not (tmp_path / "shared").exists()
        held.release()
        assert opened.result().directory == tmp_path / "shared"


def test_ranks_that_wait_for_another_run_meet_in_turns(from_old, tmp_path, monkeypatch):
    """Longer than the ranks of a run may wait for one another: each turn is a sign of life."""
    asked = []

    def main_decides(question):
        asked.append(question())
        if asked.count(False) == 4:
            held.release()
        return asked[-1]

    monkeypatch.setattr("lerobot_craft.training.anchor_source.main_decides", main_decides)
    monkeypatch.setattr("lerobot_craft.training.anchor_source._TURN", 0.01)
    held = FileLock(tmp_path / ".shared.lock")
    held.acquire()
    anchors = open_anchors(from_old("act", retention_mode="action", anchor_cache_dir=tmp_path / "shared"))
    assert asked[:5] == [False, False, False, False, True], "no cache yet; then one try and two turns in vain"
    assert anchors.directory == tmp_path / "shared"


@pytest.mark.parametrize("resumed", [False, True])
def test_whether_a_cache_is_there_is_what_the_main_rank_sees(resumed, context_of, build, monkeypatch):
    """Else one rank would open it and the other build it."""
    monkeypatch.setattr("lerobot_craft.training.anchor_source.main_decides", lambda question: False)
    context = context_of("act", retention_mode="action", anchor_cache_dir=build("act", retention_mode="action"))
    with pytest.raises(CraftError, match="holds no finished cache"):
        open_anchors(resume(context) if resumed else context)


def test_whether_a_cache_is_finished_is_what_the_main_rank_sees(from_old, tmp_path, monkeypatch):
    context = from_old("act", retention_mode="action")
    open_anchors(context)
    monkeypatch.setattr("lerobot_craft.anchors.build.main_decides", lambda question: False)
    with pytest.raises(CraftError, match=r"are not in .* any more"):
        open_anchors(resume(context))
    job = _job(context, tmp_path / "new")
    monkeypatch.setattr("lerobot_craft.anchors.build.main_decides", lambda question: True)
    build_cache(job, tmp_path / "new", ranks=Ranks())
    assert not (tmp_path / "new" / MANIFEST_FILE).exists(), "to the main rank it is finished: nobody builds"


def test_without_craft_home_caches_lie_beside_lerobots_datasets(from_old, monkeypatch, tmp_path):
    monkeypatch.delenv("CRAFT_HOME")
    monkeypatch.setattr("lerobot.utils.constants.HF_LEROBOT_HOME", tmp_path / "lerobot")
    assert open_anchors(from_old("act", retention_mode="action")).directory.parent == tmp_path / "lerobot/craft/anchors"


@pytest.mark.parametrize("teacher", ["cache", "online"])
@pytest.mark.parametrize(("policy", "taken"), [("pi0_fast", 2), ("smolvla", 5)])
def test_few_old_frames_fill_half_a_batch_unless_every_visit_is_the_same(policy, taken, teacher, from_old):
    old = {"anchor_source": "both", "old_instructions": "; ".join(OLD_TASKS), "old_frames": 3, "num_anchors": 63}
    anchors = open_anchors(from_old(policy, teacher=teacher, retention_mode="action", **old))
    chosen = []
    if teacher == "cache":
        anchors.loader.take = lambda indices, draw: chosen.append(indices)
    else:
        anchors._ask = lambda indices, *rest: chosen.append(indices)
    for step in range(4):
        anchors.batch(step, 10, rank=0, world_size=1)
    # Eight visits of an old frame for one of the 60 others: 8 * 3 / (8 * 3 + 60) of ten places.
    assert [int((~anchors.cross[indices]).sum()) for indices in chosen] == [taken] * 4


def test_cross_anchors_are_built_from_the_new_data(context_of, tmp_path):
    flags = {"anchor_source": "cross", "old_instructions": "; ".join(OLD_TASKS[:2]), "num_anchors": 8}
    anchors = open_anchors(context_of("pi0_fast", anchor_cache_dir=tmp_path / "cross", **flags))
    assert list(anchors.tasks) == OLD_TASKS[:2]
    assert anchors.directory == tmp_path / "cross"
    assert anchors.manifest.datasets[0].repo_id == "local/new"


def test_an_unfinished_build_is_gone_on_with(from_old, tmp_path, monkeypatch):
    whole = open_anchors(from_old("act", retention_mode="action", anchor_cache_dir=tmp_path / "whole"))
    context = from_old("act", retention_mode="action", anchor_cache_dir=tmp_path / "stopped")
    with monkeypatch.context() as before_the_manifest:
        before_the_manifest.setattr("lerobot_craft.anchors.build._finish", stop)
        with pytest.raises(KeyboardInterrupt):
            open_anchors(context)
    assert not (tmp_path / "stopped" / MANIFEST_FILE).exists()
    assert open_anchors(context).identity() == whole.identity()


def stop(*_):
    raise KeyboardInterrupt


def test_the_teacher_of_a_built_cache_is_the_policy_without_its_adapter(from_old, context_of, tmp_path):
    context = from_old("smolvla", retention_mode="action", lora=LORA, anchor_cache_dir=tmp_path / "lora")
    trained = context.trained
    train_a_little(context)  # the adapter speaks now; it must not be heard
    with_adapter = open_anchors(context)
    plain = open_anchors(from_old("smolvla", retention_mode="action", anchor_cache_dir=tmp_path / "plain"))
    assert with_adapter.identity() == plain.identity()
    assert {id(p) for p in context.trained} == {id(p) for p in trained}


def test_neither_a_cache_nor_an_origin(context_of, tmp_path):
    for given, said in ((None, "there are no anchors"), (tmp_path / "none", "none holds no finished cache")):
        with pytest.raises(CraftError, match=said) as refusal:
            open_anchors(context_of("act", retention_mode="action", anchor_cache_dir=given))
        for remedy in ("craft cache build", "--craft.old_instructions", "--craft.old_dataset.repo_id"):
            assert remedy in str(refusal.value)


def test_a_resumed_run_never_builds(from_old):
    context = from_old("act", retention_mode="action")
    with pytest.raises(CraftError, match=r"not in .* any more.*--craft.anchor_cache_dir"):
        open_anchors(resume(context))
    anchors = open_anchors(context)
    train_a_little(context)
    assert open_anchors(resume(context)).identity() == anchors.identity()


def test_another_teacher_is_refused_in_a_fresh_run_only(context_of, build):
    directory = build("act", retention_mode="action")
    context = context_of("act", retention_mode="action", anchor_cache_dir=directory)
    other = dataclasses.replace(context.teacher, fingerprint=context.teacher.fingerprint | {"weights": "0" * 64})
    context = dataclasses.replace(context, teacher=other)
    with pytest.raises(CraftError, match="its weights differ"):
        open_anchors(context)
    open_anchors(resume(context))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"hidden_layer": "-1"}, r"layer 3 \(--craft.hidden_layer=-1\)"),
        ({"layers_to_save": "-2,-1"}, r"layer 2, 3 \(--craft.layers_to_save=-2,-1\)"),
        ({"pooling": "mean_masked"}, "pooling mean_masked"),
        ({"per_token": True}, "every token"),
        ({"hidden_layer": "-1", "per_token": True}, "layer 3 .* and every token"),
    ],
)
def test_layers_and_pooling_must_be_the_caches(flags, said, context_of, build):
    directory = build("pi0_fast")
    refused = pytest.raises(
        CraftError, match=f"holds layer 2, pooling mean_image_tokens, and training asks for .*{said}"
    )
    with refused, spelled(flag_of):
        open_anchors(context_of("pi0_fast", anchor_cache_dir=directory, **flags))
    agreeing = {"hidden_layer": "2", "pooling": "mean_image_tokens"}
    open_anchors(context_of("pi0_fast", anchor_cache_dir=directory, **agreeing))


def test_a_cache_of_every_token_gives_layer_scales(context_of, build):
    directory = build("pi0_fast", layers_to_save="-2,-1", per_token=True)
    anchors = open_anchors(context_of("pi0_fast", anchor_cache_dir=directory, layers_to_save="-1,-2", per_token=True))
    assert anchors.retained.pooling == PER_TOKEN
    scales = anchors.layer_scales("l1")
    assert set(scales) == {"2", "3"}
    assert all(scale > 0 for scale in scales.values())


@pytest.mark.parametrize(
    ("policy", "retention_mode", "loss_type", "said"),
    [
        ("pi0_fast", "hidden", "kl", "use mse, l1, cosine"),
        ("pi0_fast", "action", "mse", "use kl"),
        ("pi0_fast", "token_ce", "kl", "leave it out"),
        ("act", "action", "kl", "use mse, l1, cosine"),
    ],
)
def test_a_loss_that_cannot_compare_is_refused(policy, retention_mode, loss_type, said, context_of, build):
    directory = build(policy, retention_mode=retention_mode)
    settings = {"retention_mode": retention_mode, "anchor_cache_dir": directory}
    with pytest.raises(CraftError, match=f"--craft.loss_type={loss_type} cannot compare .*{said}"):
        open_anchors(context_of(policy, loss_type=loss_type, **settings))
    open_anchors(context_of(policy, **settings))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"anchor_source": "cross", "old_instructions": ";".join(OLD_TASKS)}, "it has dataset anchors"),
        ({"anchor_source": "auto", "old_dataset": "local/old"}, "anchor_source=both, it has dataset anchors"),
        ({"old_instructions": OLD_TASKS[0]}, "--craft.old_instructions, it has open the drawer; close"),
        ({"old_dataset": "local/other"}, "it has frames of local/old"),
    ],
)
def test_a_cache_of_other_anchors_than_the_flags_name_is_refused(flags, said, context_of, build):
    if "old_dataset" in flags:
        flags = flags | {"old_dataset": DatasetFlags(flags["old_dataset"])}
    directory = build("pi0_fast")
    with pytest.raises(CraftError, match=f"holds other anchors than the flags ask for.*{said}"):
        open_anchors(context_of("pi0_fast", anchor_cache_dir=directory, **flags))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"old_instructions": "press it"}, "Give --craft.old_dataset.repo_id and --craft.old_dataset.root"),
        ({"anchor_source": "cross", "old_instructions": "press it"}, "--craft.anchor_source=dataset"),
        ({"num_anchors": 2, "old_dataset": None}, "--craft.num_anchors=3 or more"),
        ({"retention_mode": "token_ce", "old_dataset": None}, "use --craft.retention_mode=action"),
        ({"old_frames": 2, "old_dataset": None}, "--craft.old_frames is for --craft.anchor_source=both"),
        ({"walked_states": 2.0, "old_dataset": None}, "--craft.walked_states=2.0 is a share"),
    ],
)
def test_complaints_name_the_flags_of_training(flags, said, context_of, anchor_data):
    if "old_dataset" in flags:
        flags = flags | {"old_dataset": old_dataset(anchor_data)}
    with pytest.raises(CraftError, match=said) as refusal, spelled(flag_of):
        open_anchors(context_of("act", **{"retention_mode": "action", **flags}))
    assert "--dataset" not in str(refusal.value)
    assert "--num_samples" not in str(refusal.value)


def test_a_directory_with_something_else_in_it_is_left_alone(from_old, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("x")
    with pytest.raises(CraftError, match=r"give another --craft.anchor_cache_dir"), spelled(flag_of):
        open_anchors(from_old("act", retention_mode="action", anchor_cache_dir=tmp_path / "notes"))
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["todo.txt"]


def test_a_damaged_cache_is_refused(context_of, build):
    directory = build("act", retention_mode="action")
    shard = directory / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CraftError, match="SHA-256 is not the one"):
        open_anchors(context_of("act", retention_mode="action", anchor_cache_dir=directory))
    assert (directory / MANIFEST_FILE).exists()
