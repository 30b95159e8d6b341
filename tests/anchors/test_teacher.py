import json

import pytest
import torch

from lerobot_craft.anchors.teacher import load_teacher
from lerobot_craft.errors import CraftError
from tests.anchors.teacher_checkpoints import edit_tensors, save_vla


def test_a_good_checkpoint_becomes_a_teacher(act, capsys):
    teacher = load_teacher(act)
    assert not teacher.policy.training
    assert teacher.config.type == "act"
    assert teacher.config.pretrained_path == act
    assert set(teacher.config.output_features) == {"action"}
    assert capsys.readouterr().out == "", "lerobot's loader prints; a teacher loads quietly"


@pytest.mark.parametrize(
    ("policy_type", "overrides"), [("pi0", []), ("pi05", []), ("pi05", ["--dtype=bfloat16"]), ("smolvla", [])]
)
def test_other_policies_become_teachers_too(policy_type, overrides, tmp_path):
    directory = save_vla(policy_type, tmp_path / policy_type)
    teacher = load_teacher(directory, overrides)
    assert any(p.dtype == torch.bfloat16 for p in teacher.policy.parameters()) == bool(overrides)


def test_settings_may_be_changed(act):
    assert load_teacher(act, ["--n_action_steps=2"]).config.n_action_steps == 2


def test_the_postprocessor_undoes_the_teachers_normalization(act):
    teacher = load_teacher(act)
    torch.testing.assert_close(teacher.postprocessor(torch.ones(1, 2)), torch.full((1, 2), 2.5))


@pytest.mark.parametrize("policy_type", ["act", "diffusion"])
def test_weights_of_a_backbone_that_the_checkpoint_overwrites_are_not_asked_for(policy_type, tmp_path, monkeypatch):
    directory = save_vla(policy_type, tmp_path / policy_type)
    stock = {"pretrained_backbone_weights": "ResNet18_Weights.IMAGENET1K_V1"}
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | stock))

    def download(self, *arguments, **options):
        raise OSError("there is no internet here")

    monkeypatch.setattr("torchvision.models.WeightsEnum.get_state_dict", download)
    teacher = load_teacher(directory)
    kept = teacher.config.pretrained_backbone_weights, teacher.policy.config.pretrained_backbone_weights
    assert kept == (stock["pretrained_backbone_weights"],) * 2  # as the checkpoint says it


def set_type(file, name):
    file.write_text(json.dumps(json.loads(file.read_text()) | {"type": name}))


DAMAGES = {
    "has no config.json": lambda d: (d / "config.json").unlink(),
    "config.json is no JSON": lambda d: (d / "config.json").write_text("{"),
    "'folding' .* is not registered": lambda d: set_type(d / "config.json", "folding"),
    "no model.safetensors": lambda d: (d / "model.safetensors").unlink(),
    "model.safetensors cannot be read": lambda d: (d / "model.safetensors").write_bytes(b"\0" * 100),
    "size mismatch for model.action_head.bias": lambda d: edit_tensors(
        d / "model.safetensors", lambda tensors: tensors.update({"model.action_head.bias": torch.ones(9)})
    ),
    "1 tensor is missing .*: model.action_head.bias": lambda d: edit_tensors(
        d / "model.safetensors", lambda tensors: tensors.pop("model.action_head.bias")
    ),
    "policy_preprocessor.json": lambda d: (d / "policy_preprocessor.json").unlink(),
    "State file .* not found": lambda d: next(d.glob("*_normalizer_processor.safetensors")).unlink(),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_a_damaged_checkpoint_is_refused(act, sentence):
    DAMAGES[sentence](act)
    with pytest.raises(CraftError, match=sentence):
        load_teacher(act)


def test_a_directory_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(CraftError, match="There is no checkpoint directory"):
        load_teacher(tmp_path / "nowhere")


def test_of_a_training_checkpoint_the_policy_inside_is_loaded(act):
    inner = act.parent / "000100" / "pretrained_model"
    inner.parent.mkdir()
    act.rename(inner)
    assert load_teacher(inner.parent).fingerprint == load_teacher(inner).fingerprint


@pytest.mark.parametrize(("setting", "sentence"), [("--wheels=4", "wheels"), ("--chunk_size=many", "chunk_size")])
def test_a_setting_the_policy_does_not_have_is_refused(act, capsys, setting, sentence):
    with pytest.raises(CraftError, match=sentence):
        load_teacher(act, [setting])
    assert capsys.readouterr().err == ""


def test_a_policy_of_the_hub_is_found_where_it_was_downloaded_to(act, tmp_path, monkeypatch):
    import huggingface_hub.constants

    snapshot = tmp_path / "hub" / "models--me--act" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    act.rename(snapshot)
    refs = tmp_path / "hub" / "models--me--act" / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_teacher("me/act").config.pretrained_path == snapshot
