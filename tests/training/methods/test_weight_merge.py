"""Averaged weights against the formula, and nothing left behind in the policy that was trained."""

import copy
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.training.methods.weight_merge import (
    Merged,
    WeightMerge,
    alpha_name,
    merged_tensors,
    parse_alphas,
    sweep_table,
)

ALPHAS = "0.2,0.75"


def started(context):
    method = WeightMerge()
    method.start(context)
    return method


def move(policy, size=0.1):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def states(policy, into):
    """A `save_policy` that keeps what it is told to save."""

    def save(directory, note):
        into[directory] = {name: tensor.clone() for name, tensor in policy.state_dict().items()}

    return save


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.frozen, self.body, self.norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.gain = nn.Parameter(torch.randn(3).to(torch.bfloat16))
        self.frozen.requires_grad_(False)


def test_every_alpha_gives_the_average_and_the_trained_weights_come_back(module_context, tmp_path):
    policy = Student()
    start = copy.deepcopy(policy.state_dict())
    method = started(module_context(policy, method="merge", merge_alphas=ALPHAS))
    move(policy)
    policy.norm.running_mean.add_(1.0)
    policy.norm.num_batches_tracked.add_(7)
    trained = copy.deepcopy(policy.state_dict())
    saved = {}
    method.finish(states(policy, saved))
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, trained[name]), name
    assert list(saved) == [tmp_path / "merged" / f"alpha_{a}" / "pretrained_model" for a in ("0.20", "0.75")]
    for alpha, state in zip((0.2, 0.75), saved.values(), strict=True):
        for name, tensor in state.items():
            if tensor.is_floating_point() and not name.startswith("frozen"):
                expected = (1 - alpha) * start[name].float() + alpha * trained[name].float()
                torch.testing.assert_close(tensor, expected.to(tensor.dtype), rtol=0, atol=0)
        assert state["norm.num_batches_tracked"] == 7
        assert torch.equal(state["frozen.weight"], start["frozen.weight"])


def test_the_sweep_is_written_and_logged(module_context, tmp_path, caplog):
    policy = Student()
    method = started(module_context(policy, method="merge", merge_alphas=ALPHAS))
    start = {name: tensor.clone() for name, tensor in merged_tensors(policy).items()}
    move(policy)
    moved = math.sqrt(
        sum((t.float() - start[n].float()).square().sum().item() for n, t in merged_tensors(policy).items())
    )
    with caplog.at_level("INFO"):
        method.finish(lambda directory, note: None)
    rows = json.loads((tmp_path / "merged" / "sweep.json").read_text())["merged"]
    assert [row["alpha"] for row in rows] == [0.0, 0.2, 0.75, 1.0]
    assert [row.get("path") for row in rows] == [
        None,
        "merged/alpha_0.20/pretrained_model",
        "merged/alpha_0.75/pretrained_model",
        None,
    ]
    assert rows[0]["weight_drift"] == 0
    assert rows[-1]["weight_drift"] == pytest.approx(moved)
    assert "old_loss" not in rows[0]
    assert "merged/alpha_0.75/pretrained_model" in caplog.text


def test_the_trained_weights_come_back_when_saving_fails(module_context):
    policy = Student()
    method = started(module_context(policy, method="merge"))
    move(policy)
    trained = copy.deepcopy(policy.state_dict())

    def full_disk(directory, note):
        raise CraftError("the disk is full")

    with pytest.raises(CraftError, match="disk is full"):
        method.finish(full_disk)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, trained[name]), name


def test_a_resumed_run_merges_with_the_weights_before_the_first_run(module_context):
    policy = Student()
    state = started(module_context(policy, method="merge", merge_alphas="0")).state_dict()
    start = policy.body.weight.detach().clone()
    move(policy)
    resumed = started(module_context(policy, method="merge", merge_alphas="0", resumed=True))
    resumed.load_state_dict(state)
    saved = {}
    resumed.finish(states(policy, saved))
    assert torch.equal(next(iter(saved.values()))["body.weight"], start)


def test_losses_of_old_and_new_frames_stand_in_the_table(policy_context, tmp_path):
    from lerobot_craft.training.methods.demonstrations import demonstration_loss, old_demonstrations

    context = policy_context(method="merge", merge_alphas="0.5")
    context.train.batch_size = 32
    method = started(context)
    method._measured = {"old_loss": old_demonstrations(context, 6), "new_loss": method._measured["new_loss"]}
    frames = method._measured["old_loss"]
    (raw,) = frames.batches(32)
    with torch.no_grad():
        before = demonstration_loss(context, raw, frames.cameras, context.seed).item()
        move(context.policy)
        after = demonstration_loss(context, raw, frames.cameras, context.seed).item()
    method.finish(lambda directory, note: context.policy.save_pretrained(directory))
    first, middle, last = json.loads((tmp_path / "merged" / "sweep.json").read_text())["merged"]
    assert (first["old_loss"], last["old_loss"]) == (pytest.approx(before), pytest.approx(after))
    assert after > before
    assert len({row["new_loss"] for row in (first, middle, last)}) == 3
    saved = load_file(tmp_path / middle["path"] / "model.safetensors")
    name, start = "model.action_out_proj.weight", method._kept
    trained = context.policy.state_dict()[name]
    (origin,) = start.tensors([name])
    torch.testing.assert_close(saved[name], 0.5 * origin + 0.5 * trained, rtol=0, atol=0)


def test_of_lora_it_is_the_weights_that_are_averaged_and_not_the_factors(policy_context):
    from lerobot.configs.default import PeftConfig

    context = policy_context(method="merge", merge_alphas="0.3", old=None, peft=PeftConfig(r=4))
    method = started(context)
    move(context.policy)

    def effective():
        whole = copy.deepcopy(context.policy).merge_and_unload()
        return {name: tensor for name, tensor in whole.state_dict().items() if tensor.is_floating_point()}

    start, trained, merged = context.teacher.policy.state_dict(), effective(), {}
    method.finish(lambda directory, note: merged.update(effective()))
    changed = [name for name in trained if not torch.equal(trained[name], start[name])]
    assert changed
    for name in trained:
        expected = 0.7 * start[name] + 0.3 * trained[name]
        torch.testing.assert_close(merged[name], expected, rtol=1e-4, atol=1e-5)


def test_lora_that_does_not_start_at_zero_is_refused(policy_context):
    from lerobot.configs.default import PeftConfig

    context = policy_context(method="merge", old=None, peft=PeftConfig(r=4))
    move(context.policy)
    with pytest.raises(CraftError, match="does not start at zero"):
        started(context)


@pytest.mark.parametrize("text", ["", "0.2,0.2", "0.5,1.5", "-0.1", "half", "nan", "0.2;0.4"])
def test_bad_shares_are_refused(module_context, text):
    with pytest.raises(CraftError, match=r"--craft\.merge_alphas.*from 0 to 1"):
        started(module_context(Student(), method="merge", merge_alphas=text))


def test_shares_are_read_as_written():
    assert parse_alphas(" 0.2, 1,0 ") == [0.2, 1.0, 0.0]


@pytest.mark.parametrize(
    ("alpha", "name"), [(0.2, "alpha_0.20"), (1.0, "alpha_1.00"), (0.125, "alpha_0.125"), (0.0, "alpha_0.00")]
)
def test_directories_have_distinct_names(alpha, name):
    assert alpha_name(alpha) == name


def test_the_table_shows_what_was_measured():
    lines = sweep_table(
        [Merged(0.0, 0.0, None), Merged(0.5, 1.5, "merged/x", old_loss=0.25, new_loss=0.5)]
    ).splitlines()
    assert lines[1].split() == ["0", "0.000e+00", "-", "-", "-"]
    assert lines[2].split() == ["0.5", "1.500e+00", "0.2500", "0.5000", "merged/x"]
