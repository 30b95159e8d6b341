"""What is checked while the parts of a run are made, and that making CRaFT's own leaves the others alone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from lerobot_craft.tiny.make import make_local_dataset
from lerobot_craft.training.checkpoints import CRAFT_CONFIG_FILE
from lerobot_craft.training.journal import read_metrics
from lerobot_craft.training.methods.method import Method
from lerobot_craft.training.methods.registry import METHODS
from tests.anchor_fixtures import NEW_TASKS

TOP, WRIST = "observation.images.top", "observation.images.wrist"
OWN = ("--craft.enabled=true", "--craft.retention_mode=action", "--craft.num_anchors=6", "--craft.probe_anchors=6")


@pytest.fixture
def old_data(anchor_data):
    return ("--craft.old_dataset.repo_id=local/old", f"--craft.old_dataset.root={anchor_data / 'old'}")


def losses(run):
    return [values["loss"] for values in read_metrics(run)]


@pytest.mark.slow  # four runs
def test_the_same_seed_gives_the_same_batches_and_noise_with_and_without_anchors(
    train_flags, craft_train, old_data, tmp_path
):
    plain, held = tmp_path / "plain", tmp_path / "held"
    assert craft_train(*train_flags("smolvla", plain), *OWN, "--craft.method=naive") == 0
    assert craft_train(*train_flags("smolvla", held), *OWN, *old_data, "--craft.retention_freq=5") == 0
    assert losses(held)[0] == losses(plain)[0]
    assert losses(held) == pytest.approx(losses(plain), rel=1e-5)  # up to how a norm is summed for the clip
    assert len(set(losses(plain))) == 3


def test_what_a_method_draws_before_the_first_step_changes_nothing_after_it(
    train_flags, craft_train, monkeypatch, tmp_path
):
    class Drawing(Method):
        def start(self, context):
            super().start(context)
            torch.rand(3)

    assert craft_train(*train_flags("smolvla", tmp_path / "plain"), *OWN, "--craft.method=naive") == 0
    monkeypatch.setitem(METHODS, "naive", Drawing)
    assert craft_train(*train_flags("smolvla", tmp_path / "drawing"), *OWN, "--craft.method=naive") == 0
    assert losses(tmp_path / "drawing") == losses(tmp_path / "plain")


def test_what_is_left_open_is_settled_and_kept_with_the_checkpoint(train_flags, craft_train, old_data, tmp_path, capfd):
    assert craft_train(*train_flags("smolvla", tmp_path / "run", batch_size=9, steps=1), *OWN, *old_data) == 0
    assert "Anchor batch size: 9\n" in capfd.readouterr().err
    saved = json.loads((tmp_path / "run/checkpoints/last/pretrained_model" / CRAFT_CONFIG_FILE).read_text())
    assert (saved["anchor_batch_size"], saved["num_draws"]) == (9, 1)


def test_with_a_share_a_step_has_as_many_samples_as_a_plain_one(train_flags, craft_train, old_data, tmp_path, capfd):
    flags = train_flags("smolvla", tmp_path / "run", batch_size=9, steps=1)
    assert craft_train(*flags, *OWN, *old_data, "--craft.anchor_share=0.375") == 0
    assert "Anchor batch size: 3 in place of new samples\n" in capfd.readouterr().err
    state = json.loads((tmp_path / "run/checkpoints/last/training_state/training_step.json").read_text())
    assert state["batch_size"] == 6


@pytest.mark.parametrize(
    ("flags", "told"),
    [((), False), (("--craft.preload=true",), False), (("--craft.initial_lambda=2",), True)],
    ids=["none", "one with effect", "one without"],
)
def test_flags_without_effect_are_told(flags, told, train_flags, craft_train, tmp_path, capfd):
    assert craft_train(*train_flags("smolvla", tmp_path / "run", steps=1), *flags) == 0
    assert ("the other --craft flags have no effect" in capfd.readouterr().err) == told


def test_a_teacher_that_lacks_a_tensor_is_refused(train_flags, craft_train, old_data, checkpoints, tmp_path, capfd):
    """lerobot's own loader of this policy would go on with random weights in its place."""
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints("pi0_fast"), broken)
    tensors = load_file(broken / "model.safetensors")
    lost = next(name for name in tensors if "q_proj" in name)
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, broken / "model.safetensors")
    assert craft_train(*train_flags("pi0_fast", tmp_path / "run", policy__path=broken), *OWN, *old_data) == 2
    assert "1 tensor is missing from the file, so their values are random" in capfd.readouterr().err


def test_a_teacher_without_its_file_is_refused_first(train_flags, craft_train, checkpoints, tmp_path, capfd):
    broken = tmp_path / "broken"
    shutil.copytree(checkpoints("smolvla"), broken)
    (broken / "model.safetensors").unlink()
    flags = train_flags("smolvla", tmp_path / "run", policy__path=broken, dataset__root=tmp_path / "nowhere")
    assert craft_train(*flags, *OWN) == 2
    assert "There is no model.safetensors in" in capfd.readouterr().err


def test_new_data_outside_the_kept_range_are_told_with_numbers(train_flags, craft_train, tmp_path, capfd):
    from lerobot_craft.tiny.make import make_local_dataset

    far = tmp_path / "far"
    make_local_dataset(far, ["push the blue cube to the left"], image_size=64, seed=1)
    import json

    stats = json.loads((far / "meta" / "stats.json").read_text())
    stats["action"] = {name: [value * 10 for value in values] for name, values in stats["action"].items()}
    (far / "meta" / "stats.json").write_text(json.dumps(stats))
    flags = train_flags("smolvla", tmp_path / "run", dataset__root=far, steps=1)
    assert craft_train(*flags, *OWN, "--craft.method=naive") == 0
    assert "normalization=keep: action[" in capfd.readouterr().err


def test_another_frame_rate_and_a_camera_that_nobody_reads_are_said_at_the_start(
    train_flags, craft_train, old_data, anchor_data, tmp_path, capfd
):
    new = make_local_dataset(tmp_path / "new", NEW_TASKS, cameras=(TOP, WRIST), image_size=64, fps=25)
    flags = train_flags("act", tmp_path / "run", dataset__root=new, steps=1)
    assert craft_train(*flags, *OWN, *old_data) == 0
    said = " ".join(capfd.readouterr().err.split())
    assert (
        "local/old has 10 frames per second and the new data local/new have 25: one action lasts 0.1 s in the old "
        "tasks and 0.04 s in the new. The policy cannot tell, so at either rate the robot does the other tasks 2.5 "
    ) in said
    assert f"the new dataset has the camera {WRIST}, which this act does not read" in said
    assert f"(it reads {TOP})" in said
    same = train_flags("act", tmp_path / "same", steps=1)
    assert craft_train(*same, *OWN, *old_data) == 0
    said = capfd.readouterr().err
    assert "frames per second" not in said
    assert "does not read" not in said
