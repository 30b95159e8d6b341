"""docs/method.md, equations (26) and (27): a distribution as its largest entries and one for the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from lerobot_craft.core import drift, tail
from lerobot_craft.core.tail import fold_tail, largest_entries
from lerobot_craft.training.dry_step import Ledger


@st.composite
def problems(draw):
    """Teacher's and student's logits [2, 3, V] in float64, and how many entries to keep."""
    vocabulary = draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    spread = draw(st.sampled_from([0.01, 1.0, 10.0, 100.0]))
    logits = spread * torch.randn(2, 2, 3, vocabulary, generator=generator, dtype=torch.float64)
    return logits[0], logits[1], draw(st.integers(1, vocabulary + 2))


@given(problems())
def test_the_kept_entries_are_the_largest(problem):
    teacher, _, k = problem
    kept = largest_entries(teacher, k)
    assert kept.shape[-1] == min(k, teacher.shape[-1])
    dropped = teacher.scatter(-1, kept, float("-inf"))
    assert (teacher.gather(-1, kept).amin(-1) >= dropped.amax(-1)).all()


@given(problems())
def test_folding_groups_the_probabilities(problem):
    teacher, student, k = problem
    kept = largest_entries(teacher, k)
    for logits in (teacher, student):
        full = logits.softmax(-1)
        head = full.gather(-1, kept)
        rest = full.scatter(-1, kept, 0).sum(-1, keepdim=True)
        assert_close(fold_tail(logits, kept).softmax(-1), torch.cat([head, rest], dim=-1))


@given(problems())
def test_the_folded_divergence_never_exceeds_the_full_one(problem):
    teacher, student, k = problem
    kept = largest_entries(teacher, k)
    folded = drift(fold_tail(student, kept), fold_tail(teacher, kept), "kl", reduction="none")
    full = drift(student, teacher, "kl", reduction="none")
    assert (folded <= full * (1 + 1e-9) + 1e-9).all()
    assert (folded >= -1e-9).all()


@given(problems())
def test_keeping_everything_is_exact(problem):
    teacher, student, _ = problem
    kept = largest_entries(teacher, teacher.shape[-1] + 1)
    folded = drift(fold_tail(student, kept), fold_tail(teacher, kept), "kl", reduction="none")
    assert_close(folded, drift(student, teacher, "kl", reduction="none"))


@given(problems())
def test_equal_distributions_have_no_divergence(problem):
    teacher, _, k = problem
    folded = fold_tail(teacher, largest_entries(teacher, k))
    assert drift(folded, folded.clone(), "kl") == 0


@given(problems())
def test_the_gradient_is_finite_and_that_of_the_grouped_divergence(problem):
    teacher, student, k = problem
    kept = largest_entries(teacher, k)
    student.requires_grad_()
    value = drift(fold_tail(student, kept), fold_tail(teacher, kept), "kl")
    (gradient,) = torch.autograd.grad(value, student)
    assert torch.isfinite(gradient).all()
    # A shift of all logits changes no distribution, so the gradient sums to zero.
    assert_close(gradient.sum(-1), torch.zeros_like(gradient.sum(-1)), rtol=0, atol=1e-9)


def test_one_kept_entry_against_a_hand_computed_value():
    logits = torch.tensor([2.0, 1.0, 0.0]).log1p()  # probabilities 3/6, 2/6, 1/6
    folded = fold_tail(logits, largest_entries(logits, 1))
    assert_close(folded.softmax(-1), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    logits = torch.randn(4, 50).to(dtype)
    kept = largest_entries(logits, 5)
    folded = fold_tail(logits, kept)
    assert folded.dtype == torch.float32
    assert torch.equal(folded, fold_tail(logits.float(), kept))


@pytest.mark.parametrize("k", [0, -1])
def test_nothing_kept_is_refused(k):
    with pytest.raises(ValueError, match="at least one entry"):
        largest_entries(torch.randn(3), k)


def by_autograd(logits, kept):
    """The definition, (26), left to autograd."""
    rest = logits.scatter(-1, kept, float("-inf")).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logits.gather(-1, kept), rest], dim=-1)


@pytest.mark.parametrize("block", [1, 7, 14, 2**24])
def test_slices_have_the_values_and_the_gradient_of_the_whole(block, monkeypatch):
    monkeypatch.setattr(tail, "_BLOCK", block)
    logits = torch.randn(3, 4, 7, dtype=torch.float64)[:, 1:].requires_grad_()  # not in one piece
    kept = largest_entries(logits, 2)
    weight = torch.randn(3, 3, 3, dtype=torch.float64)
    results = [
        (f := fold(logits, kept), torch.autograd.grad((f * weight).sum(), logits)) for fold in (fold_tail, by_autograd)
    ]
    assert_close(*results)


def test_entries_that_are_all_impossible_have_no_gradient():
    logits = torch.tensor([1.0, float("-inf"), float("-inf")], requires_grad=True)
    folded = fold_tail(logits, torch.tensor([0]))
    assert folded.tolist() == [1.0, float("-inf")]
    assert torch.autograd.grad(folded[0], logits)[0].tolist() == [1.0, 0.0, 0.0]


def test_an_ignored_position_may_hold_anything():
    logits = torch.randn(2, 5)
    logits[1] = float("nan")
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(fold_tail(logits, torch.tensor([[0], [0]]))[0].sum(), logits)
    assert gradient[0].any()
    assert not gradient[1].any()


def test_nothing_as_large_as_the_logits_is_held_beside_them_and_their_gradient(monkeypatch):
    monkeypatch.setattr(tail, "_BLOCK", 1000)
    logits = torch.randn(64, 1000).bfloat16().requires_grad_()
    kept = largest_entries(logits, 4)
    with (ledger := Ledger()), ledger.phase("folding"):
        torch.autograd.grad(fold_tail(logits, kept).sum(), logits)
    assert ledger.peak("folding").bytes < 2.5 * logits.nbytes
