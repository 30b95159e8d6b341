import signal

import pytest

from lerobot_craft.training.saving import Interruption


@pytest.fixture
def listening():
    """Has taken the signals of this process, and gives them back."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    with Interruption(active=True, save_minutes=0, main=False) as interruption:
        interruption.listen()
        yield interruption
    signal.signal(signal.SIGINT, before)


def send(number):
    signal.raise_signal(number)  # to this thread; os.kill may pick another one, and the handler then runs later


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_step_goes_on(number, listening):
    assert listening.decide() == (False, 0)
    send(number)
    assert listening.decide() == (True, number)


def test_sigterm_may_come_from_the_scheduler_and_from_the_launcher(listening):
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert listening.decide() == (True, signal.SIGTERM)


def test_a_rollout_is_cut_short_by_a_signal_and_not_begun_after_one(listening):
    done = []

    def work():
        done.append("begun")
        send(signal.SIGTERM)
        done.append("ended")

    listening.run_unless_stopped(work)
    listening.run_unless_stopped(work)
    assert done == ["begun"]
    assert listening.decide() == (True, signal.SIGTERM)


def test_an_interrupt_that_is_no_signal_of_ours_passes(listening):
    def work():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        listening.run_unless_stopped(work)


def test_signals_are_given_back_and_an_ignored_one_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption(active=True, save_minutes=0, main=False) as interruption:
            interruption.listen()
            send(signal.SIGINT)
            send(signal.SIGTERM)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert interruption.decide() == (True, signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_clock_of_the_main_rank_asks_for_a_checkpoint():
    late = Interruption(active=True, save_minutes=1e-12, main=True)
    assert late.decide() == (True, 0)
    assert Interruption(active=True, save_minutes=1e-12, main=False).decide() == (False, 0)
    assert Interruption(active=False, save_minutes=1e-12, main=True).decide() == (False, 0)
    assert Interruption(active=True, save_minutes=10, main=True).decide() == (False, 0)
