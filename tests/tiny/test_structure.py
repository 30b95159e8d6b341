import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.recipes import full_size

PALIGEMMA = "model.paligemma_with_expert.paligemma"
VOCABULARY, WIDTH = 257_152, 2048


def parameters(policy):
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    return {name: tuple(p.shape) for name, p in policy.named_parameters()}


def total(policy):
    return sum(p.numel() for p in policy.parameters())


def test_pi0_fast_is_the_real_one():
    policy = full_size("pi0_fast")
    shapes = parameters(policy)
    assert 3.4e9 < total(policy) < 3.5e9
    assert len(policy.model.paligemma_with_expert.paligemma.model.language_model.layers) == 18
    assert shapes[f"{PALIGEMMA}.model.language_model.embed_tokens.weight"] == (VOCABULARY, WIDTH)
    assert shapes[f"{PALIGEMMA}.lm_head.weight"] == (VOCABULARY, WIDTH)
    # One position for each of the 256 image tokens of a camera.
    assert shapes[f"{PALIGEMMA}.model.vision_tower.vision_model.embeddings.position_embedding.weight"] == (256, 1152)


@pytest.mark.parametrize(("policy_type", "billions"), [("pi0", 4.03), ("pi05", 4.14)])
def test_pi0_and_pi05_have_an_expert_as_deep_as_the_language_model(policy_type, billions):
    policy = full_size(policy_type)
    parameters(policy)
    both = policy.model.paligemma_with_expert
    assert len(both.paligemma.model.language_model.layers) == len(both.gemma_expert.model.layers) == 18
    assert total(policy) / 1e9 == pytest.approx(billions, abs=0.005)


def test_smolvla_has_the_size_that_was_published():
    policy = full_size("smolvla")
    assert parameters(policy)["model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"] == (49_280, 960)
    assert total(policy) == 450_046_176  # lerobot/smolvla_base


def test_another_policy_is_refused():
    with pytest.raises(CraftError, match="act"):
        full_size("act")
