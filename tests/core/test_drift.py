import math

import pytest
import torch
from torch.testing import assert_close

from lerobot_craft.core import drift, token_cross_entropy

KINDS = ["mse", "cosine", "l1", "kl"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("mse", ((1 - 0) ** 2 + (2 - 4) ** 2) / 2),
        ("l1", (1 + 2) / 2),
        ("cosine", 1 - (2 * 4) / (math.sqrt(5) * 4)),
        (
            "kl",
            sum(
                p * (math.log(p) - math.log(q))
                for p, q in zip(
                    [1 / (1 + math.e**4), math.e**4 / (1 + math.e**4)],
                    [math.e / (math.e + math.e**2), math.e**2 / (math.e + math.e**2)],
                    strict=True,
                )
            ),
        ),
    ],
)
def test_value_by_hand(kind, expected):
    student, teacher = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert drift(student, teacher, kind).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_drift_from_itself(kind):
    x = torch.randn(3, 5, 7)
    assert drift(x, x, kind).item() == 0.0


def test_cosine_of_opposite_vectors_is_two_and_of_two_zeros_is_zero():
    x = torch.randn(4, 8)
    assert_close(drift(x, -x, "cosine", reduction="none"), torch.full((4,), 2.0))
    assert drift(torch.zeros(1, 8), torch.zeros(1, 8), "cosine").item() == 0.0


def test_cosine_keeps_its_digits_where_the_drift_is_small():
    teacher = torch.randn(1, 64, dtype=torch.float64)
    student = teacher + 1e-5 * torch.randn(1, 64, dtype=torch.float64)
    exact = 1 - torch.cosine_similarity(student, teacher).item()  # ~1e-10: float32 could not hold 1 - cos
    assert drift(student.float(), teacher.float(), "cosine").item() == pytest.approx(exact, rel=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_gives_a_finite_float32_with_gradients(kind, dtype):
    student = (300 * torch.randn(2, 3, 16)).to(dtype).requires_grad_()  # 300^2 overflows float16
    teacher = (300 * torch.randn(2, 3, 16)).to(dtype)
    loss = drift(student, teacher, kind)
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    loss.backward()
    assert student.grad.dtype == dtype
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("kind", KINDS)
def test_float64_stays_float64_and_differentiates(kind):
    student = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: drift(s, teacher, kind), (student,))
    drift(student, teacher, kind).backward()
    assert teacher.grad is None  # the teacher is a constant


@pytest.mark.parametrize("kind", KINDS)
def test_masked_positions_count_for_nothing_even_if_they_are_nan(kind):
    student, teacher = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)
    expected = torch.stack([drift(student[i, m], teacher[i, m], kind) for i, m in enumerate(mask)])
    student[~mask], teacher[~mask] = math.nan, math.inf
    student.requires_grad_()
    per_sample = drift(student, teacher, kind, mask=mask, reduction="none")
    assert_close(per_sample, expected)
    assert_close(drift(student, teacher, kind, mask=mask), expected.mean())
    per_sample.sum().backward()
    assert torch.isfinite(student.grad).all()
    assert (student.grad[~mask] == 0).all()


def test_sample_without_valid_position_does_not_enter_the_mean():
    student, teacher = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    mask = torch.tensor([[True, True, True], [False, False, False]])
    assert_close(drift(student, teacher, mask=mask, reduction="none"), torch.tensor([1.0, 0.0]))
    assert drift(student, teacher, mask=mask).item() == 1.0
    assert drift(student, teacher, mask=torch.zeros(2, 3, dtype=torch.bool)).item() == 0.0


def test_scale_divides_position_drifts():
    student, teacher = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)  # [B, layers, T, D]
    per_layer = torch.tensor([1.0, 10.0, 100.0])
    expected = sum(drift(student[:, i], teacher[:, i]) / per_layer[i] for i in range(3)) / 3
    assert_close(drift(student, teacher, scale=per_layer[:, None]), expected)
    assert_close(drift(student, teacher, scale=4.0), drift(student, teacher) / 4)


def test_reduction_none_is_one_value_per_sample():
    student, teacher = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    per_sample = drift(student, teacher, reduction="none")
    assert per_sample.shape == (5,)
    assert_close(per_sample.mean(), drift(student, teacher))
    assert drift(student[:, 0], teacher[:, 0], reduction="none").shape == (5,)


def test_bad_input_is_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"mse, cosine, l1, kl.*'huber'"):
        drift(x, x, "huber")
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        drift(x, x.T)
    for scale in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            drift(x, x, scale=scale)
    for mask in (None, torch.ones(2, dtype=torch.bool)):
        with pytest.raises(ValueError, match="reduction must be mean or none; got 'sum'"):
            drift(x, x, mask=mask, reduction="sum")


def test_token_cross_entropy_ignores_padding():
    logits = torch.randn(2, 4, 10, requires_grad=True)
    labels = torch.randint(10, (2, 4))
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.bool)
    log_p = logits.detach().log_softmax(-1)
    expected = torch.stack([-log_p[i, m].gather(-1, labels[i, m, None]).mean() for i, m in enumerate(mask)])
    labels[~mask] = -100
    assert_close(token_cross_entropy(logits, labels, mask=mask, reduction="none"), expected)
    assert_close(token_cross_entropy(logits, labels, mask=mask), expected.mean())
    token_cross_entropy(logits.half(), labels, mask=mask).backward()
    assert torch.isfinite(logits.grad).all()


def test_token_cross_entropy_vanishes_for_a_certain_student():
    labels = torch.randint(10, (2, 4))
    logits = 100 * torch.nn.functional.one_hot(labels, 10).float()
    assert token_cross_entropy(logits, labels).item() == pytest.approx(0.0, abs=1e-6)
