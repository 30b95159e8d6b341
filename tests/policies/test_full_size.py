"""The adapters on policies of the real size, on the meta device: shapes without memory."""

import pytest
import torch

from lerobot_craft.policies import adapter_for

PROMPT = 200


@pytest.fixture(scope="module")
def pi0_fast():
    from lerobot_craft.tiny.recipes import full_size

    return full_size("pi0_fast")


def test_pi0_fast_has_eighteen_layers(pi0_fast):
    adapter = adapter_for(pi0_fast.config)
    assert adapter.stacks(pi0_fast) == {"": 18}
    assert [layer.index for layer in adapter.resolve(pi0_fast, "-2,-1")] == [16, 17]


def test_every_reached_module_exists(pi0_fast):
    adapter = adapter_for(pi0_fast.config)
    names = [name for name, _ in pi0_fast.named_parameters()]
    for layers in (None, adapter.resolve(pi0_fast, "-2"), adapter.resolve(pi0_fast, "-1")):
        for module in adapter.reaches(pi0_fast, layers):
            assert any(name.startswith(f"{module}.") for name in names), module
    free = set(names) - set(adapter.reached_parameters(pi0_fast, adapter.resolve(pi0_fast, "-2")))
    assert all(
        ".layers.17." in name or name.endswith(("language_model.norm.weight", "lm_head.weight")) for name in free
    )


def test_a_camera_is_256_tokens_and_the_prompt_comes_after(pi0_fast):
    adapter = adapter_for(pi0_fast.config)
    (layer,) = adapter.resolve(pi0_fast, "-2")
    batch = {
        "observation.images.top": torch.zeros(2, 3, 224, 224, device="meta"),
        "observation.language.tokens": torch.zeros(2, PROMPT, dtype=torch.long, device="meta"),
        "observation.language.attention_mask": torch.ones(2, PROMPT, dtype=torch.bool, device="meta"),
    }
    with torch.no_grad():
        tokens = adapter.hidden(pi0_fast, batch, [layer])[layer]
    assert tokens.hidden.shape == (2, 256 + PROMPT, 2048)
    assert tokens.mask.shape == (2, 256 + PROMPT)
    assert tokens.spans.image == ((0, 256),)
    assert tokens.spans.language == (256, 256 + PROMPT)
