"""The drift of the actions: zero for the teacher, the same after a restart, and measured without a trace."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lerobot_craft.anchors.values import student_drift
from lerobot_craft.errors import CraftError
from lerobot_craft.policies import adapter_for, mode
from lerobot_craft.training.action_drift import PROBE_FILE, ActionDrift, ActionProbe, evenly, spared
from lerobot_craft.training.anchor_batches import policy_inputs
from lerobot_craft.training.anchor_source import open_anchors
from tests.anchor_fixtures import OLD_TASKS
from tests.training.anchor_contexts import LORA, OPEN_DATASET, make_context, old_dataset, resume, train_a_little

CASES = [
    ("pi0_fast", "hidden", False),
    ("pi0_fast", "token_ce", False),
    ("pi0_fast", "action", True),
    ("pi0", "hidden", False),
    ("smolvla", "action", False),
    ("act", "hidden", False),
    ("act", "hidden", True),
    ("diffusion", "action", False),
    ("diffusion", "hidden", True),
]


@pytest.fixture
def started(teachers, anchor_data, opened_once, monkeypatch, build):
    """Function to a context and its anchors, from a cache or online."""
    monkeypatch.setattr(OPEN_DATASET, opened_once)

    def made(policy_type, retention_mode, *, online=False, **more):
        layer = {"hidden_layer": "-1"} if retention_mode == "hidden" else {}
        if online:
            more |= {"teacher": "online", "old_dataset": old_dataset(anchor_data)}
        else:
            more.setdefault("anchor_cache_dir", build(policy_type, retention_mode=retention_mode, **layer))
        settings = {"probe_anchors": 7, "anchor_batch_size": 4, **layer, **more}
        context = make_context(teachers(policy_type), anchor_data, retention_mode=retention_mode, **settings)
        return context, open_anchors(context)

    return made


@pytest.mark.parametrize(("policy", "retention_mode", "online"), CASES)
def test_it_is_zero_for_the_teacher_and_the_same_after_a_restart(policy, retention_mode, online, started, tmp_path):
    context, anchors = started(policy, retention_mode, online=online)
    probe = ActionProbe.prepare(context, anchors, tmp_path)
    assert probe.num_anchors == 7
    assert probe.in_own_error == (online or policy != "act")  # a cache of hidden states keeps no demonstration
    found = probe.measure(context.policy)
    assert abs(found.mean) < 1e-6
    assert list(found.per_task) == OLD_TASKS
    train_a_little(context)
    moved = probe.measure(context.policy)
    assert moved.mean > 1e-6
    assert moved.mean == pytest.approx(sum(moved.per_task.values()) / 3)
    again = resume(context)
    resumed = ActionProbe.prepare(again, open_anchors(again), tmp_path)
    assert resumed.measure(context.policy).per_task == moved.per_task


def test_an_interval_resamples_the_frames_of_each_task_and_needs_four():
    frames = {"open": torch.tensor([0.1, 0.2, 0.3, 0.4]).double(), "close": torch.tensor([0.5, 0.6]).double()}
    found = ActionDrift(frames, verified=True).with_intervals()
    assert found["action_drift/open"] == pytest.approx(0.25)
    assert found["action_drift"] == pytest.approx(0.4)
    assert 0.1 <= found["action_drift_low/open"] < 0.2 < 0.3 < found["action_drift_high/open"] <= 0.4
    assert not {"action_drift_low/close", "action_drift_low"} & found.keys()
    assert found == ActionDrift(frames, verified=True).with_intervals()


def test_a_fifth_of_the_real_frames_is_spared_where_that_leaves_enough():
    instructions = torch.tensor([0] * 25 + [1] * 19 + [0] * 100)
    cross = torch.arange(144) >= 44
    found = spared(SimpleNamespace(tasks=("open", "close"), instructions=instructions, cross=cross))
    assert len(found) == 5
    assert set(found.tolist()) <= set(range(1, 24)), "of the first task, neither made up nor at an end"


def test_whether_a_probe_was_saved_is_what_the_main_rank_sees(started, tmp_path, monkeypatch):
    context, anchors = started("diffusion", "action")
    ActionProbe.prepare(context, anchors, tmp_path)
    saved = (tmp_path / PROBE_FILE).read_bytes()
    (tmp_path / PROBE_FILE).unlink()
    monkeypatch.setattr("lerobot_craft.training.action_drift.main_decides", lambda question: True)
    with pytest.raises(CraftError, match="cannot be used"):  # as the main rank, this one reads it
        ActionProbe.prepare(resume(context), anchors, tmp_path)
    (tmp_path / PROBE_FILE).write_bytes(saved)
    assert ActionProbe.prepare(resume(context), anchors, tmp_path).num_anchors == 7


def test_it_leaves_the_mode_and_all_random_generators_alone(started, tmp_path):
    context, anchors = started("act", "action")  # in train mode it drops out and draws a latent
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    probe = ActionProbe.prepare(context, anchors, tmp_path)
    for training in (True, False):
        context.policy.train(training)
        assert probe.measure(context.policy).per_task == probe.measure(context.policy).per_task
        assert context.policy.training is training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]
    assert all(parameter.grad is None for parameter in context.policy.parameters())


def test_the_unit_is_the_teachers_own_error_on_all_anchors(started, tmp_path):
    context, anchors = started("act", "action")
    probe = ActionProbe.prepare(context, anchors, tmp_path)
    train_a_little(context)
    batch = anchors.take(evenly(anchors.instructions, 7))
    inputs = policy_inputs(batch.raw, context.teacher.preprocessor)
    with torch.no_grad(), mode(context.policy, train=False):
        adapter = adapter_for(context.teacher.config)
        drift = student_drift(adapter, context.policy, inputs, batch.columns, anchors.retained, "mse")
    first = drift[batch.instruction == 0].mean().item() / anchors.units("mse")[0]
    assert probe.measure(context.policy).per_task[OLD_TASKS[0]] == pytest.approx(first, rel=1e-5)


def test_an_adapter_does_not_speak_for_the_teacher(started, tmp_path):
    context, anchors = started("smolvla", "hidden", lora=LORA)
    train_a_little(context)
    assert ActionProbe.prepare(context, anchors, tmp_path).measure(context.policy).mean > 1e-6


def test_the_file_says_which_anchors_and_what_the_teacher_did(started, tmp_path):
    context, anchors = started("pi0_fast", "hidden")
    ActionProbe.prepare(context, anchors, tmp_path)
    held = load_file(tmp_path / PROBE_FILE)
    assert held["anchor"].tolist() == evenly(anchors.instructions, 7).tolist()
    assert {"target", "target.offsets", "kept", "fixed.tokens", "own_error.kl"} <= held.keys()
    assert "frame" not in held


def test_a_lost_or_damaged_probe_is_refused_unless_the_teacher_can_be_asked(started, tmp_path):
    context, anchors = started("pi0_fast", "hidden")
    ActionProbe.prepare(context, anchors, tmp_path)
    file = tmp_path / PROBE_FILE
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CraftError, match=r"cannot be used.*--craft.probe_anchors=0"):
        ActionProbe.prepare(resume(context), anchors, tmp_path)
    file.unlink()
    again = resume(context)
    with pytest.raises(CraftError, match=r"not there any more.*--craft.probe_anchors=0"):
        ActionProbe.prepare(again, open_anchors(again), tmp_path)
    without = resume(context, probe_anchors=0)
    assert ActionProbe.prepare(without, anchors, tmp_path) is None
    of_actions, anchors = started("pi0_fast", "action", online=True)
    ActionProbe.prepare(of_actions, anchors, tmp_path)
    made = file.read_bytes()
    file.unlink()
    ActionProbe.prepare(resume(of_actions), anchors, tmp_path)
    assert file.read_bytes() == made


def test_a_probe_of_other_anchors_is_refused(started, tmp_path):
    context, anchors = started("act", "action")
    ActionProbe.prepare(context, anchors, tmp_path)
    anchors.instructions = anchors.instructions.flip(0)
    with pytest.raises(CraftError, match="it belongs to other anchors"):
        ActionProbe.prepare(resume(context), anchors, tmp_path)


def test_hidden_states_of_diffusion_in_a_cache_have_no_probe(started, tmp_path, caplog):
    context, anchors = started("diffusion", "hidden")
    assert ActionProbe.prepare(context, anchors, tmp_path) is None
    assert "the drift of the actions is not measured" in caplog.text
    assert not (tmp_path / PROBE_FILE).exists()


def test_there_are_no_more_than_there_are(started, tmp_path):
    context, anchors = started("act", "action", probe_anchors=1000)
    assert ActionProbe.prepare(context, anchors, tmp_path).num_anchors == 18


def test_tasks_take_turns():
    instructions = torch.tensor([0, 0, 0, 0, 2, 1, 0, 2])
    assert evenly(instructions, 3).tolist() == [0, 4, 5]
    assert evenly(instructions, 6).tolist() == [0, 1, 2, 4, 5, 7]
    assert evenly(instructions, 8).tolist() == list(range(8))


def visited(anchors, steps=60):
    """Anchors that the steps of a run take."""
    of_steps = [anchors.batch(step, 4, 0, 1) for step in range(steps)]
    return {tuple(row) for batch in of_steps for row in batch.raw["observation.state"].flatten(1).tolist()}


@pytest.mark.parametrize("source", ["cross", "both"])
def test_plenty_of_made_anchors_spare_those_of_the_probe(source, started, build, tmp_path):
    few = {"old_frames": 5} if source == "both" else {}
    cache = build(
        "smolvla", "plenty", retention_mode="action", anchor_source=source, num_anchors=66, drawn_states=1.0, **few
    )
    context, anchors = started("smolvla", "action", anchor_cache_dir=cache, probe_anchors=3)
    everything = visited(anchors)
    probe = ActionProbe.prepare(context, anchors, tmp_path)
    assert probe.held_out
    chosen = load_file(tmp_path / PROBE_FILE)["anchor"]
    assert anchors.cross[chosen].all()
    spared = {tuple(row) for row in anchors.take(chosen).raw["observation.state"].flatten(1).tolist()}
    assert len(spared) == 3
    assert visited(anchors) == everything - spared
    again = resume(context)
    resumed = open_anchors(again)
    assert ActionProbe.prepare(again, resumed, tmp_path).held_out
    assert visited(resumed) == visited(anchors)


def test_real_frames_are_spared_and_measured_on_where_there_are_enough(started, build, tmp_path):
    cache = build("smolvla", "plenty", retention_mode="action", anchor_source="dataset", num_anchors=66)
    context, anchors = started("smolvla", "action", anchor_cache_dir=cache, probe_anchors=1)
    before = visited(anchors)
    probe = ActionProbe.prepare(context, anchors, tmp_path)
    assert probe.real
    assert probe.held_out
    assert probe.measured_on == f"measured on {probe.num_anchors} real frames kept out of training"
    assert probe.num_anchors >= 4
    apart = anchors.take(spared(anchors)).raw["observation.state"].flatten(1).tolist()
    assert visited(anchors) == before - {tuple(row) for row in apart}


def test_few_old_frames_and_few_anchors_are_all_trained_on(started, build, tmp_path):
    for source, wanted in (("dataset", 1), ("cross", 4)):
        number = 18 if source == "dataset" else 66
        cache = build("smolvla", f"few-{source}", retention_mode="action", anchor_source=source, num_anchors=number)
        context, anchors = started("smolvla", "action", anchor_cache_dir=cache, probe_anchors=wanted)
        before = visited(anchors)
        (tmp_path / source).mkdir()
        assert not ActionProbe.prepare(context, anchors, tmp_path / source).held_out
        assert visited(anchors) == before


def test_an_online_teacher_spares_them_too(started, tmp_path):
    context, anchors = started("smolvla", "action", online=True, anchor_source="cross", num_anchors=60, probe_anchors=3)
    assert ActionProbe.prepare(context, anchors, tmp_path).held_out
    assert sum(map(len, anchors._origins)) == 57
