"""What a resumed run reads is what the first one wrote, or a refusal."""

import pytest
import torch
from torch import nn

from lerobot_craft.errors import CraftError
from lerobot_craft.training.methods.kept_tensors import START_WEIGHTS, keep, keep_start, reopen, trained_parameters


@pytest.fixture
def context(module_context):
    return module_context(nn.Linear(3, 2), method="l2sp")


def test_tensors_come_back_bit_for_bit(context, tmp_path):
    whole = torch.randn(6)
    tensors = {"b": whole[:4], "c": whole[4:], "a": torch.randn(2, 4).to(torch.bfloat16), "t": torch.randn(4, 3).t()}
    keep(context, "some.safetensors", tensors)
    for found, expected in zip(
        reopen(context, "some.safetensors", tensors).like(tensors), tensors.values(), strict=True
    ):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["some.safetensors"]


def test_what_a_killed_write_left_behind_is_overwritten(context, tmp_path):
    (tmp_path / f".{START_WEIGHTS}.tmp").write_bytes(b"half")
    keep_start(context, trained_parameters(context))
    assert [path.name for path in tmp_path.iterdir()] == [START_WEIGHTS]


def test_only_what_is_trained_is_kept(context):
    context.policy.bias.requires_grad_(False)
    assert list(trained_parameters(context)) == ["weight"]


def test_a_missing_file_is_refused_in_words(context):
    with pytest.raises(CraftError, match="l2sp wrote before the first step"):
        reopen(context, START_WEIGHTS, {})


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(3)},
        {"a": torch.zeros(2).double()},
        {"a": torch.zeros(2), "b": torch.zeros(1)},
        {"b": torch.zeros(2)},
    ],
)
def test_a_file_of_other_tensors_is_refused(context, other):
    keep(context, "some.safetensors", {"a": torch.zeros(2)})
    with pytest.raises(CraftError, match="does not fit what is trained now"):
        reopen(context, "some.safetensors", other)


def test_a_damaged_file_is_refused(context, tmp_path):
    kept = keep(context, "some.safetensors", {"a": torch.zeros(2)})
    kept.path.write_bytes(b"not tensors")
    with pytest.raises(CraftError, match="cannot be read"):
        reopen(context, "some.safetensors", {"a": torch.zeros(2)})


def test_a_flipped_byte_is_refused(context):
    kept = keep(context, "some.safetensors", {"a": torch.zeros(2)})
    sha256 = kept.sha256
    kept.require(sha256)
    data = bytearray(kept.path.read_bytes())
    data[-1] ^= 1
    kept.path.write_bytes(data)
    with pytest.raises(CraftError, match="not the file that this run was started with"):
        reopen(context, "some.safetensors", {"a": torch.zeros(2)}).require(sha256)


def test_a_place_that_cannot_be_written_is_named(module_context, tmp_path):
    (tmp_path / "file").write_text("")
    context = module_context(nn.Linear(1, 1), method="l2sp", output_dir=tmp_path / "file" / "run")
    with pytest.raises(CraftError, match="is a file, not a directory"):
        keep_start(context, trained_parameters(context))
