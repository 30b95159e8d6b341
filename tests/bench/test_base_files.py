import pytest
import torch
from safetensors.torch import load_file, save_file

from lerobot_craft.bench.cell_run import WEIGHTS, keep_weights, restore_weights, round_weights
from lerobot_craft.errors import CraftError


@pytest.fixture
def checkpoint(tmp_path):
    """Function from a seed to a directory with a configuration and weights."""

    def make(seed, width=5):
        directory = tmp_path / f"policy{seed}-{width}"
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        torch.manual_seed(seed)
        save_file({"w": torch.randn(4, width), "count": torch.arange(3)}, directory / WEIGHTS)
        return directory

    return make


def test_a_policy_from_a_file_is_the_one_that_was_trained(checkpoint, tmp_path):
    trained, start = checkpoint(1), checkpoint(2)
    before = load_file(trained / WEIGHTS)
    round_weights(trained)
    rounded = load_file(trained / WEIGHTS)
    assert rounded["w"].dtype == torch.float32
    torch.testing.assert_close(rounded["w"], before["w"], rtol=1e-3, atol=0)
    assert not torch.equal(rounded["w"], before["w"])
    file = tmp_path / "kept" / "base.safetensors"
    keep_weights(trained, file)
    restore_weights(start, file, tmp_path / "restored")
    found = load_file(tmp_path / "restored" / WEIGHTS)
    for name, value in rounded.items():
        assert torch.equal(found[name], value)
    assert (tmp_path / "restored" / "config.json").is_file()
    assert load_file(file)["w"].dtype == torch.float16


def test_weights_of_another_policy_are_refused(checkpoint, tmp_path):
    keep_weights(checkpoint(1), tmp_path / "base.safetensors")
    with pytest.raises(CraftError, match="holds the weights of another policy"):
        restore_weights(checkpoint(2, width=6), tmp_path / "base.safetensors", tmp_path / "restored")


def test_a_damaged_file_is_named(checkpoint, tmp_path):
    file = tmp_path / "base.safetensors"
    keep_weights(checkpoint(1), file)
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CraftError, match=r"base\.safetensors is damaged .*: remove it"):
        restore_weights(checkpoint(2), file, tmp_path / "restored")
