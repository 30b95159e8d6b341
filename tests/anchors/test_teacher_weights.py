import re

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from lerobot_craft.anchors.teacher import check_weights, require_weights
from lerobot_craft.errors import CraftError
from lerobot_craft.training.dry_step import Ledger
from tests.anchors.teacher_checkpoints import edit_tensors


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(7))


@pytest.fixture
def saved(tmp_path):
    """A policy of four tensors and the directory that holds them."""
    policy = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    save_model(policy, tmp_path / "model.safetensors")
    return policy, tmp_path


def refusal(policy, directory):
    with pytest.raises(CraftError) as caught:
        check_weights(policy, directory)
    return str(caught.value)


def test_a_policy_that_equals_its_file_passes(saved):
    check_weights(*saved)


def test_a_file_in_higher_precision_than_the_policy_passes(saved):
    policy, directory = saved
    check_weights(policy.to(torch.bfloat16), directory)


def test_a_tied_tensor_may_be_missing_from_the_file(tmp_path):
    policy = Tied()
    save_model(policy, tmp_path / "model.safetensors")
    check_weights(policy, tmp_path)


def test_a_twin_of_equal_values_is_not_tied(tmp_path):
    policy = Tied()
    save_model(policy, tmp_path / "model.safetensors")
    policy.head.weight = nn.Parameter(policy.embedding.weight.detach().clone())
    assert "1 tensor is missing from the file" in refusal(policy, tmp_path)


CHANGES = {
    "missing from the file": lambda tensors: tensors.pop("1.bias"),
    "in the file, but the policy has no place for them: stray": lambda tensors: tensors.update(stray=torch.ones(1)),
    "of another shape in the file: 1.bias": lambda tensors: tensors.update({"1.bias": torch.ones(3)}),
    "not what the file says: 1.bias": lambda tensors: tensors["1.bias"][0].add_(1e-6),
}


@pytest.mark.parametrize("sentence", CHANGES)
def test_a_file_that_differs_is_refused(saved, sentence):
    policy, directory = saved
    edit_tensors(directory / "model.safetensors", CHANGES[sentence])
    said = refusal(policy, directory)
    assert sentence in said
    assert "model.safetensors" in said
    assert said.count("tensor is") == 1, "only the one thing that was changed is reported"


def test_a_renamed_tensor_is_missing_and_left_over(saved):
    policy, directory = saved
    edit_tensors(directory / "model.safetensors", lambda tensors: tensors.update(gain=tensors.pop("1.bias")))
    assert re.search(r"missing .*: 1\.bias; .*no place .*: gain\.", refusal(policy, directory))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_also_when_the_file_has_it(tmp_path, value):
    policy = nn.Linear(2, 2)
    policy.bias.data[1] = value  # beside one that is finite
    save_model(policy, tmp_path / "model.safetensors")
    assert "1 tensor is holding NaN or infinity: bias" in refusal(policy, tmp_path)


@pytest.mark.parametrize(
    ("row", "found"), [(None, None), (0, "not what the file says"), (-1, "not what the file says")]
)
def test_little_memory_is_needed_beside_the_weights_and_their_file(tmp_path, row, found):
    policy = nn.Linear(1000, 3000, bias=False)  # 12 MB, more than one block of numbers
    save_model(policy, tmp_path / "model.safetensors")
    if row is not None:
        policy.weight.data[row, row] += 1
    with Ledger() as ledger, ledger.phase("check"):
        said = refusal(policy, tmp_path) if found else check_weights(policy, tmp_path)
    assert ledger.peak("check").bytes < 2 * policy.weight.nbytes + 12e6
    assert found is None or found in said


def test_random_weights_are_refused_with_a_few_names(saved):
    _, directory = saved
    said = refusal(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), directory)
    assert "4 tensors are not what the file says: 0.bias, 0.weight, 1.bias and 1 more" in said


def test_a_missing_file_is_refused(saved):
    policy, directory = saved
    (directory / "model.safetensors").unlink()
    assert "random weights" in refusal(policy, directory)


@pytest.mark.parametrize("length", [0, 5, 60, -1])
def test_a_truncated_file_is_refused(saved, length):
    policy, directory = saved
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert "cannot be read" in refusal(policy, directory)


def test_a_peft_adapter_is_refused_with_the_way_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CraftError, match="merge_and_unload"):
        require_weights(tmp_path)
