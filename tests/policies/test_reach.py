"""Configurations in which retention would hold nothing are refused, in words that say what to change."""

import copy
import dataclasses

import pytest

from lerobot_craft.errors import CraftError
from lerobot_craft.policies import check_reach, reach_of


def layer_of(subject, wanted="-2"):
    return subject.adapter.resolve(subject.policy, wanted)


def with_peft(subject, **flags):
    """The policy as `lerobot-train --peft...` wraps it."""
    from lerobot.configs.default import PeftConfig

    policy = copy.deepcopy(subject.policy)
    return policy.wrap_with_peft(peft_cli_overrides=dataclasses.asdict(PeftConfig(**flags)))


@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_hidden_states_are_refused_when_only_the_expert_is_trained(named, name):
    subject = named(name, train_expert_only=True)
    with pytest.raises(CraftError, match="it would hold nothing") as refusal:
        check_reach(subject.adapter, subject.policy, layer_of(subject))
    assert "--policy.train_expert_only=false" in str(refusal.value)
    assert "Use retention_mode=action" in str(refusal.value)


@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_the_output_and_the_experts_layers_are_accepted_when_only_the_expert_is_trained(named, name):
    subject = named(name, train_expert_only=True)
    for layers in (None, layer_of(subject, "expert:-1"), layer_of(subject, "-2,expert:-1")):
        reach = check_reach(subject.adapter, subject.policy, layers)
        assert reach.held
        assert not any("paligemma.model" in name or ".vlm." in name for name in reach.held)


def test_smolvlas_state_projection_alone_is_not_enough(named):
    subject = named("smolvla", train_expert_only=True)
    held = reach_of(subject.adapter, subject.policy, layer_of(subject)).held
    assert held == ["model.state_proj.weight", "model.state_proj.bias"]
    with pytest.raises(CraftError, match=r"reaches only model\.state_proj"):
        check_reach(subject.adapter, subject.policy, layer_of(subject))


# What lerobot itself warns or says while it wraps a policy is its own business.
@pytest.mark.parametrize("name", ["pi0", "pi05", "smolvla"])
def test_default_peft_targets_are_refused_for_hidden_states_and_accepted_for_the_output(named, name):
    subject = named(name)
    policy = with_peft(subject)
    with pytest.raises(CraftError, match=r"--peft\.target_modules") as refusal:
        check_reach(subject.adapter, policy, layer_of(subject))
    assert "it would hold nothing" in str(refusal.value)
    reach = check_reach(subject.adapter, policy, None)
    assert reach.held
    assert all("lora" in name for name in reach.held)


@pytest.mark.parametrize("name", ["pi0_fast", "pi0", "pi05", "smolvla"])
def test_the_peft_targets_that_the_refusal_names_are_accepted(named, name):
    subject = named(name)
    advice = subject.adapter.how_to_reach(subject.policy)
    targets = advice.partition("--peft.target_modules='")[2].partition("'")[0]
    reach = check_reach(subject.adapter, with_peft(subject, target_modules=targets), layer_of(subject))
    assert reach.held
    assert all("lora" in name for name in reach.held)
    # Adapters in the layers above the one that is held have nothing to hold them.
    assert reach.free
    assert all(".layers.3." in name for name in reach.free)


def test_a_frozen_policy_is_refused(named):
    subject = named("act")
    policy = copy.deepcopy(subject.policy).requires_grad_(False)
    for layers in (None, layer_of(subject)):
        with pytest.raises(CraftError, match="every parameter is frozen"):
            check_reach(subject.adapter, policy, layers)


def test_what_is_trained_is_either_held_or_free(named):
    subject = named("pi0_fast")
    reach = check_reach(subject.adapter, subject.policy, layer_of(subject))
    trained = [name for name, parameter in subject.policy.named_parameters() if parameter.requires_grad]
    assert sorted(reach.held + reach.free) == sorted(trained)
    assert any("lm_head" in name for name in reach.free)


def test_acts_latent_and_zero_queries_are_not_held(named):
    for name, never in (
        ("act", "model.decoder.layers.0.self_attn.in_proj_weight"),
        ("act-options", "model.decoder.layers.0.norm1.weight"),
    ):
        subject = named(name)
        held = set(reach_of(subject.adapter, subject.policy, None).held)
        assert not held & {never, "model.encoder_latent_input_proj.weight"}
        assert "model.encoder_latent_input_proj.bias" in held
