"""What the invariants look at: everything that can be anchored, gradients, settings that must not change."""

from contextlib import contextmanager

import pytest
import torch

from lerobot_craft.core import drift


def anchor_values(subject, policy, fixed):
    """Everything that can be anchored: hidden states of all layers in one pass, of the backbone alone, the output."""
    adapter, batch = subject.adapter, subject.batch
    fixed = {name: fixed[name] for name in adapter.fixed_names}  # what a cache keeps
    with subject.anchor_mode(policy):
        together = adapter.hidden(policy, batch, subject.layers(), fixed)
        alone = adapter.hidden(policy, batch, subject.backbone())
        output = adapter.output(policy, batch, fixed)
    values = {f"layer {layer}": (tokens.hidden, tokens.mask) for layer, tokens in together.items()}
    values |= {f"layer {layer} alone": (tokens.hidden, tokens.mask) for layer, tokens in alone.items()}
    return {**values, "output": (output.values, output.mask)}


def assert_no_drift(student, teacher):
    assert student.keys() == teacher.keys()
    for name, (values, mask) in student.items():
        assert mask.any(), name
        assert torch.isfinite(values[mask]).all(), name
        assert torch.equal(mask, teacher[name][1]), name
        assert drift(values, teacher[name][0], mask=mask) == 0, name


@contextmanager
def checkpointing(policy, enabled):
    model = getattr(policy, "model", None)
    if not enabled:
        yield
        return
    if not hasattr(model, "gradient_checkpointing_enable"):
        pytest.skip("this policy has no gradient checkpointing")
    model.gradient_checkpointing_enable()
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def gradients(policy, *found):
    """Gradients of an arbitrary, fixed function of (values, mask) at real positions; zeros where there is none."""
    generator = torch.Generator().manual_seed(0)
    value = sum((values.float() * torch.randn(values.shape, generator=generator))[mask].sum() for values, mask in found)
    parameters = dict(policy.named_parameters())
    grads = torch.autograd.grad(value, parameters.values(), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}


def attention_implementations(policy):
    configs = {name: getattr(module, "config", None) for name, module in policy.named_modules()}
    return {name: getattr(config, "_attn_implementation", None) for name, config in configs.items()}


def assert_close(values, expected):
    """Equal but for the order of sums, relative to the largest value."""
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
