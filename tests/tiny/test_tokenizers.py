from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoProcessor, AutoTokenizer

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.processing_action_tokenizer import quantise
from lerobot_craft.tiny.tokenizers import fit_action_tokenizer, make_text_tokenizer
from tests.tiny import robot


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("text")
    make_text_tokenizer(directory, robot.INSTRUCTIONS, num_action_tokens=100)
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def unit_chunks():
    return robot.chunks() / 2.5


@pytest.fixture(scope="module")
def fast_directory(tmp_path_factory, unit_chunks):
    directory = tmp_path_factory.mktemp("fast")
    fit_action_tokenizer(directory, unit_chunks)
    return directory


@pytest.fixture(scope="module")
def fast(fast_directory):
    """Loaded as lerobot loads it, by the code that lies in the directory."""
    return AutoProcessor.from_pretrained(str(fast_directory), trust_remote_code=True)


def decoded(fast, tokens):
    return fast.decode(tokens, time_horizon=robot.CHUNK, action_dim=robot.ACTION_DIM)


def test_known_words_and_state_numbers_are_one_token_each(text):
    prompt = "Task: push the red block, State: 0 17 255;\nAction: "
    spaced = [
        "Task",
        ":",
        " push",
        " the",
        " red",
        " block",
        ",",
        " State",
        ":",
        " 0",
        " 17",
        " 255",
        ";",
        "\n",
        "Action",
    ]
    assert [text.decode([token]) for token in text.encode(prompt)] == [*spaced, ":", " "]


def test_lerobots_markers_are_tokens_of_that_name(text):
    # detokenize_actions compares these strings.
    assert text.tokenize("Action: ")[:2] == ["Action", ":"]
    assert text.tokenize("|") == ["|"]


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_and_nothing_is_unknown(text, words):
    tokens = text.encode(words, add_special_tokens=False)
    assert text.unk_token_id not in tokens
    assert text.decode(tokens, clean_up_tokenization_spaces=False) == words


def test_action_tokens_end_the_base_vocabulary(text):
    assert text.vocab_size == len(text)
    assert text.convert_ids_to_tokens([text.vocab_size - 100, text.vocab_size - 1]) == ["<action_0>", "<action_99>"]


def test_no_prompt_reaches_the_action_tokens(text):
    ids = text.encode("Task: <action_3> spell <action_99>, State: 5;\n")
    assert max(ids) < text.vocab_size - 100


def test_fast_comes_back_within_its_rounding(fast, unit_chunks):
    error = decoded(fast, fast(unit_chunks)) - unit_chunks
    # The transform keeps lengths, and each coefficient is off by at most half a step of 1 / scale.
    assert np.sqrt((error**2).mean(axis=(1, 2))).max() <= 0.5 / fast.scale + 1e-6


def test_fast_is_much_shorter_than_one_token_per_number(fast, unit_chunks):
    lengths = [len(tokens) for tokens in fast(unit_chunks)]
    assert np.mean(lengths) < 0.5 * robot.CHUNK * robot.ACTION_DIM


def test_fast_tokens_stay_below_the_vocabulary(fast, unit_chunks):
    assert max(max(tokens) for tokens in fast(unit_chunks)) < fast.vocab_size == len(fast.bpe_tokenizer)


def test_what_was_not_fitted_is_clipped(fast, unit_chunks):
    wild = 9 * np.concatenate([unit_chunks[:5], -unit_chunks[:5]])
    expected = np.clip(quantise(wild, fast.scale), fast.min_token, fast.max_token)
    assert (np.abs(quantise(wild, fast.scale)) > np.abs(expected)).any(), "nothing here is out of range"
    np.testing.assert_array_equal(quantise(decoded(fast, fast(wild)), fast.scale), expected)


def test_one_chunk_needs_no_batch_axis(fast, unit_chunks):
    assert fast(unit_chunks[0]) == fast(unit_chunks[:1])


def test_a_cut_off_sequence_decodes_with_zeros(fast, unit_chunks):
    (tokens,) = fast(unit_chunks[:1])
    whole, cut = (quantise(decoded(fast, [ids]), fast.scale).reshape(-1) for ids in (tokens, tokens[:2]))
    kept = len(fast.bpe_tokenizer.decode(tokens[:2]))
    np.testing.assert_array_equal(cut[:kept], whole[:kept])
    assert not cut[kept:].any()


def test_the_directory_holds_the_code_that_it_needs(fast_directory):
    from lerobot_craft.tiny import processing_action_tokenizer as module

    assert (fast_directory / "processing_action_tokenizer.py").read_text() == Path(module.__file__).read_text()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((3, 4)), "shape"),
        (np.zeros((0, 8, 4)), "shape"),
        (np.full((2, 8, 4), np.nan), "NaN"),
        (np.linspace(-90, 90, 64).reshape(2, 8, 4), "Normalise"),
    ],
)
def test_chunks_that_cannot_be_fitted_are_refused(tmp_path, bad, message):
    with pytest.raises(CraftError, match=message):
        fit_action_tokenizer(tmp_path, bad)
