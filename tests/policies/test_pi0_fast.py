"""What is pi0_fast's alone; what it shares with the others is in test_invariants.py."""

import torch


def test_the_pass_of_an_anchor_ends_at_the_readout(named, monkeypatch):
    """lerobot's loss on the anchor's own tokens would be as large as all logits, and nobody asks for it."""
    subject = named("pi0_fast")
    fixed = subject.draw()

    def nobody_asked(*args, **kwargs):
        raise AssertionError("a loss was computed")

    monkeypatch.setattr(torch.nn.CrossEntropyLoss, "forward", nobody_asked)
    output = subject.adapter.output(subject.policy, subject.batch, fixed)
    assert output.values.requires_grad
    assert output.values.shape[:2] == output.mask.shape
