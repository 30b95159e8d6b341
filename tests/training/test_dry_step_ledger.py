import torch

from lerobot_craft.training.dry_step import REST, Ledger

KIB = 256  # float32 values


def test_the_peak_is_the_largest_moment_and_not_the_end():
    with (ledger := Ledger()), ledger.phase("work"):
        kept = torch.zeros(KIB)
        passing = kept + 1  # 2 KiB now
        del passing
        torch.zeros(KIB // 2)
    assert ledger.peak("work").bytes == 2 * 1024
    assert kept.numel() == KIB


def test_views_are_the_memory_that_they_look_at():
    with (ledger := Ledger()), ledger.phase("work"):
        whole = torch.zeros(KIB)
        parts = [whole.view(2, -1), whole[1:], whole.detach()]
    assert ledger.peak("work").bytes == 1024
    assert len(parts) == 3


def test_what_autograd_saves_lives_until_the_backward_pass():
    weight = torch.ones(KIB, requires_grad=True)
    with (ledger := Ledger()), ledger.phase("forward"):
        size = ledger.label([weight], "weights")
        loss = weight.exp().exp().sum()  # each keeps its result
    assert size == 1024
    with ledger, ledger.phase("backward"):
        loss.backward()
    with ledger, ledger.phase("after"):
        torch.zeros(1)
    assert ledger.peak("forward").parts == {"weights": 1024, REST: 2 * 1024 + 4}
    ledger.label([weight.grad], "gradients")
    assert ledger.peak("after").parts["gradients"] == 1024
    assert ledger.peak("after").bytes < 2 * 1024 + 64  # the two results are gone


def test_labels_may_come_late_and_shares_move_the_peak():
    with (ledger := Ledger()), ledger.phase("work"):
        large = torch.zeros(4 * KIB)
        ledger.label([large], "divided")
        del large
        small = torch.zeros(KIB)
    assert ledger.peak("work").parts == {"divided": 4 * 1024}
    assert ledger.peak("work", {"divided": 1 / 8}).parts == {REST: 1024}
    assert small.numel() == KIB


def test_a_phase_that_broke_off_has_no_peak():
    ledger = Ledger()
    try:
        with ledger, ledger.phase("work"):
            raise ValueError
    except ValueError:
        pass
    assert not ledger.has("work")
