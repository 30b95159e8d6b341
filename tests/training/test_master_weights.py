"""`--craft.master_weights`: the run that resumes has the copies of the one that went on."""

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.runs import digests, metrics

BF16 = {"policy__dtype": "bfloat16", "save_freq": 2, "steps": 4}


@pytest.fixture
def flags(train_flags, anchor_data, tmp_path):
    def flags(name, *own, **changes):
        old = ("--craft.old_dataset.repo_id=local/old", f"--craft.old_dataset.root={anchor_data / 'old'}")
        few = ("--craft.num_anchors=6", "--craft.probe_anchors=2", "--craft.anchor_source=dataset")
        settings = train_flags("pi0_fast", tmp_path / name, **{**BF16, **changes})
        return [*settings, "--craft.enabled=true", *old, *few, *own]

    return flags


@pytest.mark.slow  # two runs and a half
@pytest.mark.timeout(300)
def test_a_resumed_run_goes_on_with_its_copies_to_the_bit(flags, craft_train, tmp_path):
    whole = tmp_path / "whole"
    assert craft_train(*flags("whole", "--craft.master_weights=true")) == 0
    state = whole / "checkpoints/last/training_state"
    copies = load_file(state / "master_weights.safetensors")
    weights = load_file(whole / "checkpoints/last/pretrained_model/model.safetensors")
    assert copies
    assert all(torch.equal(weights[name], copy.bfloat16()) for name, copy in copies.items())
    assert any(not torch.equal(weights[name].float(), copy) for name, copy in copies.items())
    moments = load_file(state / "optimizer_state.safetensors")
    assert {moment.dtype for moment in moments.values()} == {torch.float32}
    expected = digests(whole), metrics(whole)
    middle = whole / "checkpoints/000002/pretrained_model/train_config.json"
    assert craft_train(f"--config_path={middle}", "--resume=true") == 0
    assert (digests(whole), metrics(whole)) == expected


def test_float32_weights_need_no_copies(flags, craft_train, capfd):
    assert craft_train(*flags("run", "--craft.master_weights=true", policy__dtype="float32")) == 2
    assert "this policy trains none: leave it out, or give --policy.dtype=bfloat16" in capfd.readouterr().err


@pytest.mark.slow  # a run
def test_without_them_the_loss_of_updates_is_told(flags, craft_train, tmp_path, capfd):
    assert craft_train(*flags("run", steps=1)) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert "of the trained weights are bfloat16, where updates below a 512th" in said
    assert "(learning rate: 2.5e-05)" in said
    middle = tmp_path / "run/checkpoints/last/pretrained_model/train_config.json"
    assert craft_train(f"--config_path={middle}", "--resume=true", "--craft.master_weights=true", "--steps=2") == 2
    assert "was saved without --craft.master_weights" in capfd.readouterr().err
