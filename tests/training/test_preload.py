"""`--craft.preload`: a whole run with it is the run without it, to the bit."""

import shutil

import pytest

from tests.faults.runs import digests

NAIVE = ("--craft.enabled=true", "--craft.method=naive")
PRELOAD = "--craft.preload=true"
PRELOADED = "frames of local/new: "  # in the line that says so
SETTINGS_FILE = "pretrained_model/craft_config.json"
# More than an epoch of 36 frames; the second with held-out ones and a worker that persists, whose seed is drawn once.
RUNS = {
    "diffusion": {"steps": 5, "batch_size": 8, "policy__drop_n_last_frames": 3},
    "smolvla": {
        "steps": 7,
        "batch_size": 8,
        "dataset__eval_split": 0.3,
        "eval_steps": 3,
        "num_workers": 1,
        "dataloader_multiprocessing_context": "fork",
    },
}


def trained(run):
    """Every file of the last checkpoint by its digest, but the one that names the flag."""
    found = digests(run)
    assert "training_state/rng_state.safetensors" in found
    return {name: digest for name, digest in found.items() if name != SETTINGS_FILE}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize(
    "policy_type",
    ["smolvla", pytest.param("diffusion", marks=pytest.mark.slow)],  # diffusion's network is not a small one
)
def test_a_preloaded_run_is_the_other_one_to_the_bit(policy_type, train_flags, craft_train, tmp_path, capfd):
    plain, ours = tmp_path / "plain", tmp_path / "ours"
    assert craft_train(*train_flags(policy_type, plain, **RUNS[policy_type]), *NAIVE) == 0
    assert PRELOADED not in capfd.readouterr().err
    assert craft_train(*train_flags(policy_type, ours, **RUNS[policy_type]), *NAIVE, PRELOAD) == 0
    said = capfd.readouterr().err
    assert said.count(PRELOADED) == (2 if policy_type == "smolvla" else 1), "the held-out part too"
    assert "--num_workers is not used" in said
    assert trained(ours) == trained(plain)


@pytest.mark.slow
def test_a_checkpoint_of_a_plain_run_goes_on_preloaded(train_flags, craft_train, tmp_path):
    """Step 7 is in the middle of the second epoch."""
    run = tmp_path / "run"
    assert craft_train(*train_flags("smolvla", run, steps=11, batch_size=8, save_freq=7)) == 0
    whole, checkpoints = trained(run), run / "checkpoints"
    shutil.rmtree(checkpoints / "000011")
    (checkpoints / "last").unlink()
    saved = checkpoints / "000007" / "pretrained_model" / "train_config.json"
    assert craft_train(f"--config_path={saved}", "--resume=true", PRELOAD) == 0
    assert trained(run) == whole


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--dataset.streaming=true", "with --dataset.streaming=true it is never there whole"),
        ("--dataset.image_transforms.enable=true", "changes them anew at every visit"),
    ],
)
def test_what_cannot_be_preloaded_is_refused(flag, said, train_flags, craft_train, tmp_path, capfd):
    assert craft_train(*train_flags("act", tmp_path / "run"), flag, PRELOAD) == 2
    assert said in capfd.readouterr().err
