import math
import re

import pytest
import torch
from torch.testing import assert_close

from lerobot_craft.core import TokenSpans, identify_image_tokens, pool_hidden_states

# Two cameras of 3 tokens, 4 language tokens, 1 state token, as a prefix; the second camera of sample 1 is missing.
SPANS = TokenSpans(image=((0, 3), (3, 6)), language=(6, 10), state=(10, 11))
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0, 1, 1, 0, 0, 1]], dtype=torch.bool)


@pytest.fixture
def hidden():
    return torch.randn(2, 11, 8)


@pytest.mark.parametrize(
    ("pooling", "tokens"),
    [
        ("mean_image_tokens", [[0, 1, 2, 3, 4, 5], [0, 1, 2]]),
        ("mean_masked", [[0, 1, 2, 3, 4, 5, 6, 7, 8, 10], [0, 1, 2, 6, 7, 10]]),
        ("last_token", [[10], [10]]),
        ("cls_token", [[0], [0]]),
    ],
)
def test_pools_exactly_the_named_tokens(hidden, pooling, tokens):
    pooled = pool_hidden_states(hidden, MASK, pooling, SPANS)
    assert_close(pooled.features, torch.stack([hidden[i, t].mean(0) for i, t in enumerate(tokens)]))
    assert pooled.valid.all()


def test_vision_mean_and_text_last_are_stacked(hidden):
    pooled = pool_hidden_states(hidden, MASK, "vision_mean+text_last", SPANS)
    assert pooled.features.shape == (2, 2, 8)
    assert_close(pooled.features[:, 0], pool_hidden_states(hidden, MASK, "mean_image_tokens", SPANS).features)
    assert_close(pooled.features[:, 1], torch.stack([hidden[0, 8], hidden[1, 7]]))


def test_none_keeps_every_token_and_says_which_are_real(hidden):
    pooled = pool_hidden_states(hidden, MASK, "none", SPANS)
    assert pooled.features is hidden
    assert torch.equal(pooled.valid, MASK)


def test_first_and_last_real_token_under_left_padding(hidden):
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[:, 4:9] = True
    assert_close(pool_hidden_states(hidden, mask, "cls_token", SPANS).features, hidden[:, 4])
    assert_close(pool_hidden_states(hidden, mask, "last_token", SPANS).features, hidden[:, 8])


@pytest.mark.parametrize("pooling", ["mean_image_tokens", "mean_masked", "last_token", "vision_mean+text_last"])
def test_padding_never_leaks_even_if_it_is_nan(hidden, pooling):
    expected = pool_hidden_states(hidden, MASK, pooling, SPANS).features
    spoiled = hidden.clone()
    spoiled[~MASK] = math.nan
    spoiled.requires_grad_()
    pooled = pool_hidden_states(spoiled, MASK, pooling, SPANS).features
    assert_close(pooled, expected)
    pooled.sum().backward()
    assert torch.isfinite(spoiled.grad).all()


def test_sample_without_such_tokens_is_marked_not_averaged_over_nothing(hidden):
    mask = MASK.clone()
    mask[1, :6] = False  # both cameras missing
    pooled = pool_hidden_states(hidden, mask, "vision_mean+text_last", SPANS)
    assert pooled.valid.tolist() == [[True, True], [False, True]]
    assert (pooled.features[1, 0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_means_are_taken_in_float32(dtype):
    hidden = torch.full((1, 4096, 2), 0.1).to(dtype)  # a bfloat16 sum would stall long before 4096 terms
    pooled = pool_hidden_states(hidden, torch.ones(1, 4096), "mean_masked", TokenSpans())
    assert pooled.features.dtype == torch.float32
    assert_close(pooled.features, hidden[:, 0].float())


def test_image_tokens_come_from_the_spans():
    assert identify_image_tokens(SPANS, 11).nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("pooling", "spans", "message"),
    [
        ("median", SPANS, "pooling must be one of mean_image_tokens"),
        ("mean_image_tokens", TokenSpans(), "no image tokens"),
        ("vision_mean+text_last", TokenSpans(image=((0, 3),)), "no language tokens"),
        ("mean_image_tokens", TokenSpans(image=((0, 256),)), "image tokens end at 256, but the sequence has only 11"),
        ("vision_mean+text_last", TokenSpans(image=((0, 3),), language=(3, 99)), "language tokens end at 99"),
    ],
)
def test_bad_request_is_named(hidden, pooling, spans, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pool_hidden_states(hidden, MASK, pooling, spans)


def test_span_that_runs_backwards_is_refused():
    with pytest.raises(ValueError, match=r"language span \(5, 3\)"):
        TokenSpans(language=(5, 3))


def test_mask_of_another_sequence_is_refused(hidden):
    with pytest.raises(ValueError, match=r"mask \(2, 10\).*hidden \(2, 11, 8\)"):
        pool_hidden_states(hidden, MASK[:, :10], "mean_masked", SPANS)
