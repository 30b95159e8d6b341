"""An online teacher says at every visit what a cache would hold, under noise that only the step decides."""

import dataclasses

import pytest
import torch

from lerobot_craft.anchors.columns import Ragged
from lerobot_craft.anchors.recipe import DatasetFlags
from lerobot_craft.anchors.values import student_drift
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for, mode, unwrapped
from lerobot_craft.training.anchor_batches import policy_inputs
from lerobot_craft.training.anchor_source import open_anchors
from tests.anchor_fixtures import OLD_TASKS
from tests.training.anchor_contexts import LORA, OPEN_DATASET, make_context, old_dataset, resume, train_a_little

KINDS = {
    "pooled": {"retention_mode": "hidden"},
    "per_token": {"retention_mode": "hidden", "layers_to_save": "all", "per_token": True},
    "expert": {"retention_mode": "hidden", "layers_to_save": "-1,expert:all", "per_token": True},
    "action": {"retention_mode": "action"},
    "token_ce": {"retention_mode": "token_ce"},
}


@pytest.fixture
def context_of(teachers, anchor_data, opened_once, monkeypatch):
    monkeypatch.setattr(OPEN_DATASET, opened_once)

    def made(policy_type, **settings):
        flags = {"teacher": "online", "old_dataset": old_dataset(anchor_data), **settings}
        return make_context(teachers(policy_type), anchor_data, **flags)

    return made


def both(anchors):
    return {
        "anchor_source": "both",
        "old_instructions": ";".join(OLD_TASKS),
        "num_anchors": anchors,
        "drawn_states": 0.5,
    }


def drift_of(context, anchors, batch):
    adapter, policy = adapter_for(context.teacher.config), unwrapped(context.policy)
    inputs = policy_inputs(batch.raw, context.teacher.preprocessor)
    with torch.no_grad(), mode(policy, train=adapter.train_mode):
        return student_drift(adapter, policy, inputs, batch.columns, anchors.retained, draw=batch.draw)


def same(one, two):
    """Whether two batches hold the same bits."""
    assert one.raw.keys() == two.raw.keys()
    assert one.columns.keys() == two.columns.keys()
    pairs = [(a[name], b[name]) for a, b in ((one.raw, two.raw), (one.columns, two.columns)) for name in a]
    pairs = [(a.values, b.values) if isinstance(a, Ragged) else (a, b) for a, b in pairs]
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


@pytest.mark.parametrize(
    ("policy", "kind", "source"),
    [
        ("pi0_fast", "pooled", "dataset"),
        ("pi0_fast", "token_ce", "both"),
        ("smolvla", "per_token", "both"),
        ("pi0", "action", "both"),
        ("pi05", "expert", "dataset"),
        ("act", "action", "dataset"),
        ("diffusion", "action", "dataset"),
    ],
)
def test_the_student_has_no_drift_until_it_is_trained(policy, kind, source, context_of):
    context = context_of(policy, **(both(12) if source == "both" else {}), **KINDS[kind])
    anchors = open_anchors(context)
    batch = anchors.batch(2, 5, 0, 1)
    assert batch.raw["task"] == [anchors.tasks[index] for index in batch.instruction.tolist()]
    assert "action" not in batch.raw  # as in a cache: only what the policy observes
    before = drift_of(context, anchors, batch)
    if kind == "token_ce":
        assert torch.allclose(before, batch.columns["teacher_ce"], rtol=1e-4)
    else:
        assert float(before.max()) < 1e-9
    train_a_little(context)
    again = anchors.batch(2, 5, 0, 1)
    assert same(batch, again)  # the frozen copy does not move with the student
    assert float((drift_of(context, anchors, again) - before).abs().min()) > 1e-9
    loss_type = anchors.retained.loss_types(adapter_for(context.teacher.config))[0]
    assert all(unit > 0 for unit in anchors.units(loss_type))
    assert (anchors.layer_scales(loss_type) is None) == (anchors.retained.mode != "hidden")


@pytest.mark.parametrize("policy", ["pi0_fast", "smolvla"])
def test_an_adapter_that_is_switched_off_is_the_teacher(policy, context_of):
    context = context_of(policy, retention_mode="hidden", lora=LORA)
    trained = {id(parameter) for parameter in context.trained}
    frozen = context.trained[0].requires_grad_(False)
    anchors = open_anchors(context)
    before = anchors.batch(0, 4, 0, 1)
    assert float(drift_of(context, anchors, before).max()) < 1e-9
    train_a_little(context)
    after = anchors.batch(0, 4, 0, 1)
    assert same(before, after)
    assert float(drift_of(context, anchors, after).min()) > 1e-9
    assert not frozen.requires_grad  # PEFT alone would make it trainable
    assert {id(parameter) for parameter in context.trained} == trained - {id(frozen)}
    (frames,) = anchors.costs()  # no copy of the policy
    assert "frames" in frames.what


def test_every_visit_draws_anew_and_a_resumed_run_draws_the_same(context_of):
    context = context_of("smolvla", retention_mode="action", num_anchors=6)
    anchors = open_anchors(context)
    visits = [anchors.batch(step, 6, 0, 1) for step in range(3)]
    noise = torch.cat([visit.columns["fixed.time"].flatten() for visit in visits])
    assert len(noise.unique()) == 18  # six anchors, three visits
    train_a_little(context)
    resumed = open_anchors(resume(context))  # its teacher comes from the checkpoint
    assert all(same(visit, resumed.batch(step, 6, 0, 1)) for step, visit in enumerate(visits))
    assert resumed.identity() == anchors.identity()
    assert resumed.units("mse") == anchors.units("mse")


def test_ranks_share_a_step(context_of):
    anchors = open_anchors(context_of("pi0", retention_mode="action"))
    whole = anchors.batch(1, 6, 0, 1)
    for rank in range(2):
        part = anchors.batch(1, 3, rank, 2)
        for name in ("fixed.time", "fixed.x_t"):
            assert torch.equal(part.columns[name], whole.columns[name][rank::2])
        assert torch.equal(part.instruction, whole.instruction[rank::2])


@pytest.mark.parametrize("kind", ["per_token", "action"])
def test_units_are_those_of_a_cache(kind, context_of, build):
    context = context_of("act", **KINDS[kind])
    directory = build("act", seed=context.seed, **KINDS[kind])
    from_cache = dataclasses.replace(context.config, teacher="cache", anchor_cache_dir=directory)
    online, cached = open_anchors(context), open_anchors(dataclasses.replace(context, config=from_cache))
    assert online.directory is None
    assert cached.directory == directory
    assert online.units("l1") == pytest.approx(cached.units("l1"), rel=1e-5)
    assert torch.equal(online.instructions, cached.instructions)


def test_a_frozen_copy_is_accounted_for(context_of):
    context = context_of("act", retention_mode="action")
    copied, frames, *_ = open_anchors(context).costs()
    assert copied.bytes >= sum(parameter.nbytes for parameter in context.policy.parameters())
    assert frames.bytes > 18 * 3 * 64 * 64


def test_other_instructions_are_another_recipe(context_of):
    one, two = (
        open_anchors(context_of("pi0_fast", retention_mode="hidden", anchor_source="cross", old_instructions=text))
        for text in (OLD_TASKS[0], OLD_TASKS[1])
    )
    assert one.identity() != two.identity()


def test_an_online_teacher_needs_an_origin(context_of):
    with pytest.raises(CraftError, match=r"--craft.old_dataset.repo_id.*--craft.old_instructions"):
        open_anchors(context_of("act", old_dataset=DatasetFlags()))


def test_a_given_cache_is_said_to_be_ignored(context_of, tmp_path, caplog):
    open_anchors(context_of("act", retention_mode="action", anchor_cache_dir=tmp_path))
    assert "--craft.anchor_cache_dir is not read" in caplog.text


def test_a_teacher_that_was_lost_or_exchanged_is_refused(context_of, tmp_path):
    context = resume(context_of("act", retention_mode="action"))
    with pytest.raises(CraftError, match=r"There is no model.safetensors in .*gone"):
        open_anchors(dataclasses.replace(context, teacher_path=str(tmp_path / "gone")))
    other = context.teacher.fingerprint | {"weights": "0" * 64}
    with pytest.raises(CraftError, match="not the one that this run started from"):
        open_anchors(dataclasses.replace(context, teacher=dataclasses.replace(context.teacher, fingerprint=other)))
