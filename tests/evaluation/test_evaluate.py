import pytest

from lerobot_craft.evaluation.evaluate import side_by_side


@pytest.mark.parametrize(("episodes", "expected"), [(1, 1), (20, 20), (25, 25), (26, 13), (50, 25), (100, 25)])
def test_batches_are_equal_and_not_too_large(episodes, expected):
    assert side_by_side(episodes) == expected
