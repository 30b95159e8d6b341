"""`craft train` without CRaFT is `lerobot-train`, to the bit: weights, optimizer, random state, processors."""

import hashlib
from pathlib import Path

import pytest

LAST = Path("checkpoints/last")


def digests(output_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of the last checkpoint; the settings name their own output directory."""
    last = output_dir / LAST
    files = sorted(path for path in last.rglob("*") if path.is_file() and path.name != "train_config.json")
    return {str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("policy_type", ["act", "diffusion", "smolvla", "pi0_fast"])
def test_craft_off_is_lerobot_train_to_the_bit(policy_type, train_flags, craft_train, lerobot_train, tmp_path):
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    lerobot_train(*train_flags(policy_type, stock, steps=4))
    assert craft_train(*train_flags(policy_type, ours, steps=4), "--craft.enabled=false") == 0
    expected = digests(stock)
    assert "pretrained_model/model.safetensors" in expected
    assert "training_state/rng_state.safetensors" in expected
    assert digests(ours) == expected
