"""The readout of a policy: what turns hidden states into its output, and what no loss on hidden states can hold."""

import pytest

from tests.policies.observing import gradients

POLICIES = ("pi0_fast", "pi0", "pi05", "smolvla", "act", "diffusion")


@pytest.fixture(params=POLICIES)
def subject(request, named):
    return named(request.param)


def readout_parameters(subject):
    names = [name for name, _ in subject.policy.named_parameters()]
    return {name for name in names for module in subject.adapter.readout if name.startswith(f"{module}.")}


def test_every_module_of_it_exists(subject):
    assert subject.adapter.readout
    assert set(subject.adapter.readout) <= {name for name, _ in subject.policy.named_modules()}


def test_a_loss_on_all_hidden_states_sends_no_gradient_there_and_one_on_the_output_does(subject):
    adapter, policy, fixed = subject.adapter, subject.policy, subject.draw()
    with subject.anchor_mode():
        hidden = adapter.hidden(policy, subject.batch, subject.layers(), fixed).values()
        held = gradients(policy, *(tokens[:2] for tokens in hidden))
        output = gradients(policy, adapter.output(policy, subject.batch, fixed))
    for name in readout_parameters(subject):
        assert held[name].abs().max() == 0, name
        assert output[name].abs().max() > 0, name


def test_with_it_frozen_every_other_part_of_the_output_is_held(subject):
    adapter, policy = subject.adapter, subject.policy
    free = set(adapter.reached_parameters(policy, None)) - set(adapter.reached_parameters(policy, subject.layers()))
    left = free - readout_parameters(subject)
    # A hidden state of the U-Net is its middle: nothing is seen of the way up.
    assert all(name.startswith("diffusion.unet.up_modules.") for name in left)
    assert bool(left) == (adapter.policy_type == "diffusion")
