import pytest
import torch


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_plain_fine_tuning_forgets_and_craft_keeps(example, capsys):
    rates = example("two_baskets", "--small")
    before, plain, craft = rates.values()
    assert min(before["red"], before["blue"]) >= 0.9
    assert max(plain["red"], plain["blue"]) <= 0.3
    assert min(craft.values()) >= 0.85
    assert plain["green"] >= 0.9
    assert "n = 100 episodes per cell (1 seeds)" in capsys.readouterr().out
