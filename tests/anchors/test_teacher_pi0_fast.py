"""The policy whose loader swallows every error, and whose processors do not save all of themselves."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from lerobot_craft.anchors.teacher import check_weights, fingerprint, load_teacher
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api.pretrained import load_policy, load_policy_config
from lerobot_craft.lerobot_api.processors import load_processors
from tests.anchors.teacher_checkpoints import edit_tensors

EMBEDDING = "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "model.paligemma_with_expert.paligemma.lm_head.weight"


def damage(directory, change):
    edit_tensors(directory / "model.safetensors", change)


def refusal(directory):
    """What `check_weights` says to what lerobot's loader returned, without an error of its own."""
    policy = load_policy(load_policy_config(directory))
    with pytest.raises(CraftError) as caught:
        check_weights(policy, directory)
    return str(caught.value)


def edit_json(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def move_tokenizers(checkpoint, to):
    """Let a checkpoint read its tokenizers from a copy."""
    shutil.copytree(checkpoint / "assets", to)
    before = str(Path(json.loads((checkpoint / "config.json").read_text())["text_tokenizer_name"]).parent)
    for file in (checkpoint / "config.json", checkpoint / "policy_preprocessor.json"):
        assert before in file.read_text()
        file.write_text(file.read_text().replace(before, str(to)))


def test_a_good_checkpoint_becomes_a_teacher(pi0_fast, capsys, caplog):
    teacher = load_teacher(pi0_fast)
    assert not teacher.policy.training, "lerobot leaves it in train mode"
    assert capsys.readouterr().out == ""
    assert "patch_embedding" not in caplog.text, "a notice that lerobot logs for every checkpoint"


def test_random_weights_after_a_missing_file_are_refused(pi0_fast):
    (pi0_fast / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(pi0_fast)
    with pytest.raises(CraftError, match=r"no model\.safetensors"):
        load_teacher(pi0_fast)


def test_random_weights_after_a_truncated_file_are_refused(pi0_fast):
    file = pi0_fast / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "cannot be read" in refusal(pi0_fast)


def test_random_weights_after_one_wrong_shape_are_refused(pi0_fast):
    damage(pi0_fast, lambda tensors: tensors.update({HEAD: tensors[HEAD][:-1].clone()}))
    assert "of another shape" in refusal(pi0_fast)


def test_random_weights_after_one_missing_tensor_are_refused(pi0_fast):
    damage(pi0_fast, lambda tensors: tensors.pop(HEAD))
    assert f"1 tensor is missing from the file, so their values are random: {HEAD}" in refusal(pi0_fast)


def test_random_weights_after_one_stray_tensor_are_refused(pi0_fast):
    damage(pi0_fast, lambda tensors: tensors.update(stray=torch.ones(1)))
    assert "no place for them: stray" in refusal(pi0_fast)


def test_names_without_the_prefix_pass_as_in_the_loader(pi0_fast):
    def unprefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    damage(pi0_fast, unprefix)
    load_teacher(pi0_fast)


def test_embeddings_that_the_loader_takes_from_the_head_pass(pi0_fast):
    damage(pi0_fast, lambda tensors: tensors.pop(EMBEDDING))
    load_teacher(pi0_fast)


def test_embeddings_that_the_loader_overwrites_by_the_head_are_refused(pi0_fast):
    # safetensors puts wider dtypes first, so this head comes after the embeddings, and lerobot copies it over them.
    damage(pi0_fast, lambda tensors: tensors.update({HEAD: tensors[HEAD].to(torch.bfloat16)}))
    assert f"no place for them: {EMBEDDING}" in refusal(pi0_fast)


def test_stock_processors_get_what_lerobot_does_not_save(pi0_fast):
    def as_lerobot_saves(content):
        for step in content["steps"]:
            if step["registry_name"] == "craft_action_tokenizer_processor":
                step["registry_name"] = "action_tokenizer_processor"
                del step["config"]["paligemma_tokenizer_name"], step["config"]["fast_skip_tokens"]

    ours, _ = load_processors(load_policy_config(pi0_fast))
    edit_json(pi0_fast / "policy_preprocessor.json", as_lerobot_saves)
    stock, _ = load_processors(load_policy_config(pi0_fast))
    ours, stock = (next(s for s in p.steps if hasattr(s, "fast_skip_tokens")) for p in (ours, stock))
    assert type(ours) is not type(stock)
    assert stock.fast_skip_tokens == ours.fast_skip_tokens != 128, "128 is lerobot's default"
    assert stock.paligemma_tokenizer_name == ours.paligemma_tokenizer_name


def test_using_the_tokenizers_does_not_change_the_fingerprint(pi0_fast):
    teacher = load_teacher(pi0_fast)
    teacher.preprocessor(
        {
            "observation.images.top": torch.zeros(1, 3, 32, 32),
            "observation.state": torch.zeros(1, 3),
            "action": torch.zeros(1, 8, 2),
            "task": ["open the drawer"],
        }
    )
    assert fingerprint(teacher.policy, teacher.preprocessor, teacher.postprocessor) == teacher.fingerprint


def test_the_place_of_the_tokenizers_does_not_change_the_fingerprint(pi0_fast, tmp_path):
    before = load_teacher(pi0_fast).fingerprint
    move_tokenizers(pi0_fast, tmp_path / "tokenizers")
    assert load_teacher(pi0_fast).fingerprint == before


def swap_two_tokens(tokenizers):
    def swap(content):
        vocabulary = content["model"]["vocab"]
        one, other = list(vocabulary)[20:22]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    texts = [
        file for file in tokenizers.rglob("tokenizer.json") if not (file.parent / "processor_config.json").exists()
    ]
    edit_json(texts[0], swap)


def rescale_actions(tokenizers):
    (file,) = tokenizers.rglob("processor_config.json")
    edit_json(file, lambda content: content.update(scale=content["scale"] + 1))


@pytest.mark.parametrize("change", [swap_two_tokens, rescale_actions])
def test_another_tokenizer_changes_only_tokenizers(pi0_fast, tmp_path, change):
    move_tokenizers(pi0_fast, tmp_path / "tokenizers")
    before = load_teacher(pi0_fast).fingerprint
    change(tmp_path / "tokenizers")
    after = load_teacher(pi0_fast).fingerprint
    assert {part for part in before if before[part] != after[part]} == {"tokenizers"}


def test_another_prompt_length_changes_only_tokenizers(pi0_fast):
    def lengthen_prompts(content):
        (config,) = [step["config"] for step in content["steps"] if step["registry_name"] == "tokenizer_processor"]
        config["max_length"] += 1

    before = load_teacher(pi0_fast).fingerprint
    edit_json(pi0_fast / "policy_preprocessor.json", lengthen_prompts)
    after = load_teacher(pi0_fast).fingerprint
    assert {part for part in before if before[part] != after[part]} == {"tokenizers"}
