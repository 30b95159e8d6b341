"""`craft train` without CRaFT is `lerobot-train`, to the bit: weights, optimizer, random state, processors."""

import hashlib
from pathlib import Path

import pytest

LAST = Path("checkpoints/last")
# What would show if it were forgotten: frames that are left out at an episode's end, precision, held-out episodes.
FLAGS = {
    "act": {"policy__use_amp": "true"},
    "diffusion": {"policy__drop_n_last_frames": 3},
    "smolvla": {"dataset__eval_split": 0.3, "eval_steps": 2},
    "pi0_fast": {"num_workers": 1, "dataloader_multiprocessing_context": "fork"},
}


def digests(output_dir: Path) -> dict[str, str]:
    """SHA-256 of every file of the last checkpoint; the settings name their own output directory."""
    last = output_dir / LAST
    files = sorted(path for path in last.rglob("*") if path.is_file() and path.name != "train_config.json")
    return {str(path.relative_to(last)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


_LONGER = {"act", "diffusion"}  # their images take seconds


@pytest.mark.parametrize(
    "policy_type", [pytest.param(name, marks=[pytest.mark.slow] if name in _LONGER else []) for name in FLAGS]
)
def test_craft_off_is_lerobot_train_to_the_bit(policy_type, train_flags, craft_train, lerobot_train, tmp_path):
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    flags = {"steps": 4, **FLAGS[policy_type]}
    lerobot_train(*train_flags(policy_type, stock, **flags))
    assert craft_train(*train_flags(policy_type, ours, **flags), "--craft.enabled=false") == 0
    expected = digests(stock)
    assert "pretrained_model/model.safetensors" in expected
    assert "training_state/rng_state.safetensors" in expected
    assert digests(ours) == expected
