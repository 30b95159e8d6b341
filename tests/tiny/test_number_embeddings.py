import pytest
import torch

from lerobot_craft.tiny.number_embeddings import STATE_BINS, smooth_numbers
from lerobot_craft.tiny.tokenizers import make_text_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_text_tokenizer(tmp_path_factory.mktemp("text"), ["open the drawer"])


@pytest.mark.parametrize("width", [32, 33])
def test_near_numbers_are_near_and_words_stay(tokenizer, width):
    embedding = torch.randn(len(tokenizer), width, generator=torch.Generator().manual_seed(0))
    before = embedding.clone()
    smooth_numbers(embedding, tokenizer, torch.Generator().manual_seed(1))
    rows = [tokenizer.encode(f" {number}", add_special_tokens=False)[0] for number in range(STATE_BINS)]
    numbers = embedding[rows]
    step = (numbers[1:] - numbers[:-1]).norm(dim=1)
    assert step.max() < 0.2 * numbers.norm(dim=1).mean()
    assert (numbers[0] - numbers[-1]).norm() > 3 * step.max()  # and far ones are not the same
    assert numbers.std() == pytest.approx(before.std().item(), rel=0.2)
    others = sorted(set(range(len(tokenizer))) - set(rows))
    assert torch.equal(embedding[others], before[others])
