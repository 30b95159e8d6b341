import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import (
    autocast,
    autocast_name,
    load_policy_config,
    local_checkpoint,
    require_config,
    weightless_policy,
)
from lerobot_craft.lerobot_api.processors import check_form, policy_batch


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"dtype": "bfloat16"}, "bf16"),
        ({"dtype": "float32"}, None),
        ({"dtype": "float32", "use_amp": True}, None),
        ({"dtype": "float16"}, None),  # on the CPU
        ({"use_amp": True}, "bf16"),  # torch's default on the CPU
        ({"use_amp": False}, None),
        ({}, None),
    ],
)
def test_autocast_follows_the_settings_as_lerobot_train_does(settings, name, monkeypatch):
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    config = SimpleNamespace(device="cpu", **settings)
    assert autocast_name(config) == name
    with autocast(config):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if name else torch.float32)


def test_fp16_is_for_devices_that_have_it():
    assert autocast_name(SimpleNamespace(device="cuda", dtype="float16")) == "fp16"


def test_accelerate_launch_speaks_where_the_policy_is_silent(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert autocast_name(SimpleNamespace(device="cpu", use_amp=False)) == "bf16"
    assert autocast_name(SimpleNamespace(device="cpu", dtype="float32")) is None


def test_byte_images_become_floats_before_the_preprocessor_and_the_raw_batch_stays():
    image = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    raw = {"front": image, "mask": image, "task": ["lift"]}
    batch = policy_batch(raw, ["front", "absent"], lambda data: {**data, "seen": True})
    assert batch["front"].dtype == torch.float32
    assert batch["front"].max() == 1.0
    assert batch["mask"].dtype == torch.uint8
    assert batch["seen"]
    assert raw["front"] is image
    assert "seen" not in raw


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"[1]"])
def test_a_cut_config_is_named(checkpoints, tmp_path, damage):
    copy = shutil.copytree(checkpoints("act"), tmp_path / "copy")
    (copy / "config.json").write_bytes(damage((copy / "config.json").read_bytes()))
    for load in (load_policy_config, require_config):
        with pytest.raises(CraftError, match=r"copy/config\.json .*Copy the checkpoint again"):
            load(copy)


@pytest.mark.parametrize("given", ["run", "run/checkpoints/last", "run/checkpoints/last/pretrained_model"])
def test_an_output_directory_stands_for_its_last_policy(given, tmp_path):
    policy = tmp_path / "run/checkpoints/last/pretrained_model"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{}")
    assert local_checkpoint(tmp_path / given) == policy
    assert local_checkpoint(tmp_path) == tmp_path, "nothing is guessed"


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ({"steps": None}, "steps is None"),
        ({"steps": {"a": {}}}, "steps is {'a': {}}"),
        ({"steps": 3}, "steps is 3"),
        ({"steps": [[]]}, r"steps\[0\] is \[\]"),
        ({"steps": [{"registry_name": "device_processor", "config": None}]}, r"steps\[0\]\.config is None"),
        ({"name": None, "steps": []}, "name is None"),
        ([], "no JSON object"),
    ],
)
@pytest.mark.parametrize("file", ["policy_preprocessor.json", "policy_postprocessor.json"])
def test_a_processor_that_lerobot_could_not_load_or_save_is_named_first(content, field, file, tmp_path):
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CraftError, match=rf"{file}: .*{field}.*: copy the checkpoint again"):
        check_form(tmp_path)


def test_a_policy_without_weights_has_the_types_of_the_one_that_is_trained(checkpoints, tmp_path):
    """The estimate reads both: with the language model's weights, SmolVLA's action expert is bfloat16 too."""
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = load_policy_config(checkpoints("smolvla"), ["--device=cpu", "--load_vlm_weights=true"])
    vlm = shutil.copytree(config.vlm_model_name, tmp_path / "vlm")
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(vlm)).save_pretrained(vlm)
    config.vlm_model_name = str(vlm)
    laid_out, trained = weightless_policy(config, None), SmolVLAPolicy(config)
    types = {name: tensor.dtype for name, tensor in (*trained.named_parameters(), *trained.named_buffers())}
    assert {name: t.dtype for name, t in (*laid_out.named_parameters(), *laid_out.named_buffers())} == types
    assert types["model.vlm_with_expert.lm_expert.layers.0.mlp.up_proj.weight"] == torch.bfloat16
