import shutil

import pytest
import torch
from torch import nn

from lerobot_craft.anchors.teacher import (
    compare_fingerprints,
    fingerprint,
    fingerprint_of_weights,
    load_teacher,
    normalizer_stats,
)
from tests.anchors.teacher_checkpoints import dataset_stats, edit_tensors

PARTS = {"weights", "stats", "tokenizers", "processors"}


class Empty:
    """A processor without steps."""

    steps = ()


def weights_digest(policy):
    return fingerprint(policy, Empty(), Empty())["weights"]


def differing(one, other):
    return {part for part in PARTS if one[part] != other[part]}


def test_each_part_has_a_sha256(act):
    digests = load_teacher(act).fingerprint
    assert set(digests) == PARTS
    assert all(len(bytes.fromhex(digest)) == 32 for digest in digests.values())


def test_neither_a_reload_nor_a_move_changes_it(act, tmp_path):
    before = load_teacher(act).fingerprint
    assert load_teacher(act).fingerprint == before
    assert load_teacher(shutil.move(act, tmp_path / "elsewhere")).fingerprint == before


@pytest.mark.parametrize(
    "file",
    [
        "policy_preprocessor_step_3_normalizer_processor.safetensors",
        "policy_postprocessor_step_0_unnormalizer_processor.safetensors",
    ],
)
def test_one_statistic_changes_only_stats(act, file):
    before = load_teacher(act).fingerprint
    edit_tensors(act / file, lambda tensors: tensors["action.std"][1].add_(1e-3))
    assert differing(before, load_teacher(act).fingerprint) == {"stats"}


def test_one_weight_changes_only_weights(act):
    before = load_teacher(act).fingerprint
    edit_tensors(act / "model.safetensors", lambda tensors: tensors["model.action_head.bias"][0].add_(1e-3))
    assert differing(before, load_teacher(act).fingerprint) == {"weights"}


def test_a_setting_of_a_step_changes_only_processors(act):
    before = load_teacher(act).fingerprint
    file = act / "policy_preprocessor.json"
    file.write_text(file.read_text().replace("1e-08", "1e-06"))
    assert differing(before, load_teacher(act).fingerprint) == {"processors"}


def test_the_device_of_a_step_changes_nothing(act):
    teacher = load_teacher(act)
    for step in teacher.preprocessor.steps:
        if hasattr(step, "device"):
            step.device = "cuda"
    assert fingerprint(teacher.policy, teacher.preprocessor, teacher.postprocessor) == teacher.fingerprint


def test_names_dtypes_and_shapes_count_not_only_bytes():
    whole = torch.zeros(4, dtype=torch.int32)
    same_bytes = [("a", torch.zeros(4)), ("b", torch.zeros(4)), ("a", torch.zeros(2, 2)), ("a", whole)]
    policies = [nn.ParameterDict({name: nn.Parameter(values, requires_grad=False)}) for name, values in same_bytes]
    assert len({weights_digest(policy) for policy in policies}) == 4


def test_strides_do_not_count():
    matrix = torch.arange(6.0).reshape(2, 3)
    straight, turned = (nn.ParameterDict({"a": nn.Parameter(m)}) for m in (matrix, matrix.T.contiguous().T))
    assert weights_digest(straight) == weights_digest(turned)


def test_the_stats_are_those_the_teacher_ships(act):
    shipped = normalizer_stats(load_teacher(act).preprocessor)
    expected = dataset_stats()
    assert shipped.keys() == expected.keys()
    for feature, stats in expected.items():
        torch.testing.assert_close(shipped[feature], stats)


def test_the_same_fingerprint_has_no_difference():
    one = dict.fromkeys(PARTS, "0")
    assert compare_fingerprints(one, dict(one)) == []


@pytest.mark.parametrize(
    ("part", "advice"),
    [
        ("weights", "another teacher"),
        ("stats", "--craft.normalization=keep"),
        ("tokenizers", "other tokenizers"),
        ("processors", "processor steps"),
    ],
)
def test_each_difference_has_a_sentence_that_says_what_to_do(part, advice):
    one = dict.fromkeys(PARTS, "0")
    (sentence,) = compare_fingerprints(one | {part: "1"}, one)
    assert advice in sentence
    assert "craft cache build" in sentence


def test_a_part_the_cache_does_not_have_differs():
    one = dict.fromkeys(PARTS, "0")
    assert len(compare_fingerprints({}, one)) == 4


def test_one_byte_of_a_tensor_of_many_blocks_changes_it(monkeypatch):
    monkeypatch.setattr("lerobot_craft.anchors.teacher._BLOCK", 64)
    policy = nn.Linear(40, 5, bias=False)
    before = weights_digest(policy)
    assert weights_digest(policy) == before
    for at in (0, 15, 16, 199):  # the first and the last of a block, and the last of all
        changed = nn.Linear(40, 5, bias=False)
        changed.load_state_dict(policy.state_dict())
        with torch.no_grad():
            changed.weight.view(-1)[at] += 1
        assert weights_digest(changed) != before


def test_blocks_in_another_order_are_other_weights(monkeypatch):
    monkeypatch.setattr("lerobot_craft.anchors.teacher._BLOCK", 64)
    policy, turned = nn.Linear(16, 2, bias=False), nn.Linear(16, 2, bias=False)
    with torch.no_grad():
        turned.weight.copy_(policy.weight.flip(0))
    assert weights_digest(policy) != weights_digest(turned)


def test_the_weights_below_adapters_are_those_before_they_were_put_on():
    from peft import LoraConfig, get_peft_model

    policy = nn.ModuleDict({"adapted": nn.Linear(3, 4), "copied": nn.Linear(4, 2), "left": nn.Linear(2, 2)})
    before = weights_digest(policy)
    wrapped = get_peft_model(policy, LoraConfig(r=2, target_modules=["adapted"], modules_to_save=["copied"]))
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:  # trained: the adapter and the copy
            torch.nn.init.normal_(parameter)
            assert "lora_" in name or "modules_to_save" in name
    assert fingerprint_of_weights(wrapped) == before
    policy["adapted"].base_layer.weight.data[0, 0] += 1
    assert fingerprint_of_weights(wrapped) != before
